"""Names and bytes of single tokens, for each kind of tokenizer."""

import pytest
from test_text import TOKENIZERS, encode

from nanovllm.text.vocabulary import Vocabulary

TEXT = "the cat é你 <s><tool>"


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "byt5"])
def test_the_bytes_of_tokens_join_to_the_text(name):
    tokenizer = TOKENIZERS[name]
    vocabulary = Vocabulary(tokenizer)
    text = TEXT.encode()
    if name == "unigram":  # has no tokens for these characters
        text = b"the cat <s><tool>"
    data = b"".join(map(vocabulary.read_bytes, encode(tokenizer, text.decode())))
    assert data.strip() == text


def test_bytes_that_are_no_character_are_escaped():
    for name in ("byte-level", "llama", "gemma"):
        vocabulary = Vocabulary(TOKENIZERS[name])
        names = map(vocabulary.name, encode(TOKENIZERS[name], "你"))
        assert "".join(names).strip() == r"\xe4\xbd\xa0"


def test_every_id_has_a_name():
    """Also padding above the vocabulary, and ids of a checkpoint without a tokenizer."""
    assert Vocabulary(None).name(3) == "token_id:3"
    for tokenizer in TOKENIZERS.values():
        vocabulary = Vocabulary(tokenizer)
        assert all(isinstance(vocabulary.name(i), str) for i in range(len(tokenizer)))
        assert vocabulary.name(len(tokenizer)) == f"token_id:{len(tokenizer)}"
