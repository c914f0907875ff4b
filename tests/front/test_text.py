"""From tokens to text, for each kind of tokenizer: streaming, the final text, and stop strings."""

import random
import sys
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm import detokenizer as module
from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.request import Request

SPECIAL = ["<s>", "</s>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = [
    "the cat sat on the mat, and the naïve café served tea",
    "  two  spaces\nand a line: def f(x): return x",
    "你好 world",
]
ALPHABET = [*"abt  é你好👩\u200dÿ\n▁\u0302", "the cat", " sat", "日本語", "\ufffd"]


def wrap(tokenizer):
    """A tokenizer with two special tokens and one added ordinary token."""
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def byte_level():
    """As in GPT-2, Qwen and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return wrap(tokenizer)


def byte_fallback(strip, scheme):
    """As in Llama 2 (strip, no scheme), Mistral (strip, "first") and Gemma (no strip, no scheme)."""
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    words.train_from_iterator(
        CORPUS[:2],
        trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>"], show_progress=False),
    )
    vocabulary = list(words.get_vocab()) + BYTES
    for accented in "éï":
        vocabulary.remove(accented)
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(vocabulary)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if scheme is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    else:
        prepend = [normalizers.Prepend("▁")] if strip else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return wrap(tokenizer)


def unigram(scheme):
    """As in T5: a sign for the space, no bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


def word_piece():
    """As in BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(cleanup=False),
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=80, special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


TOKENIZERS: dict[str, PreTrainedTokenizerBase] = {
    "byte-level": byte_level(),
    "llama": byte_fallback(strip=True, scheme=None),
    "mistral": byte_fallback(strip=True, scheme="first"),
    "always": byte_fallback(strip=True, scheme="always"),
    "gemma": byte_fallback(strip=False, scheme=None),
    "unigram": unigram("always"),
    "unigram-first": unigram("first"),
    "word-piece": word_piece(),
    "byt5": ByT5Tokenizer(),  # in Python; leaves out what is no text
}
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
many = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
PROMPT = [0, 1, 2]


def decode(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def byte_ids(tokenizer, data):
    return [tokenizer.convert_tokens_to_ids(BYTES[byte]) for byte in data]


def stream(tokenizer, token_ids, stop_strings=()):
    """The text shown after each token, and at the end."""
    reader = Detokenizer(tokenizer, len(PROMPT), stop_strings)
    ends = range(1, len(token_ids) + 1)
    shown = [reader.read([*PROMPT, *token_ids[:end]], is_last=False) for end in ends]
    return [*shown, reader.read([*PROMPT, *token_ids], is_last=True)]


def check_stream(tokenizer, token_ids):
    shown = stream(tokenizer, token_ids)
    for end, (before, after) in enumerate(pairwise(shown), 1):
        assert after.startswith(before)
        if "\ufffd" not in (complete := decode(tokenizer, token_ids[:end])):
            assert before == complete, "what is complete is shown at once"
    reader = Detokenizer(tokenizer, 0)
    whole = decode(tokenizer, token_ids)
    assert reader.read(token_ids, is_last=True) == whole
    assert shown[-1] == whole or not whole.startswith(shown[-2])
    return shown


# --- the text


@each_tokenizer
@many
@given(st.data())
def test_text_grows_to_what_the_tokenizer_says(name, data):
    """For any text, with special and added tokens that can split characters."""
    tokenizer = TOKENIZERS[name]
    token_ids = encode(
        tokenizer, data.draw(st.lists(st.sampled_from(ALPHABET), max_size=30).map("".join))
    )
    for token in data.draw(st.lists(st.sampled_from(["<s>", "</s>", "<tool>"]), max_size=3)):
        if token in tokenizer.get_vocab():
            token_id = tokenizer.convert_tokens_to_ids(token)
            token_ids.insert(data.draw(st.integers(0, len(token_ids))), token_id)
    shown = check_stream(tokenizer, token_ids)
    whole = decode(tokenizer, token_ids)
    assert shown[-1] == whole or whole.count("\ufffd") > 1, (
        "only an added token within a character contradicts"
    )


@each_tokenizer
def test_thousands_of_texts(name):
    rng, tokenizer = random.Random(0), TOKENIZERS[name]
    for _ in range(300):
        text = "".join(
            rng.choices(
                [*ALPHABET, chr(rng.randrange(0x80, 0xD800)), chr(rng.randrange(0x10000, 0x20000))],
                k=20,
            )
        )
        token_ids = encode(tokenizer, text)
        assert check_stream(tokenizer, token_ids)[-1] == decode(tokenizer, token_ids)


@each_tokenizer
def test_thousands_of_tokens_that_are_no_text(name):
    """Random tokens: invalid bytes, parts of words, special tokens. Strides change nothing."""
    rng, tokenizer = random.Random(0), TOKENIZERS[name]
    vocabulary = list(tokenizer.get_vocab().values())
    bytes_ = (
        byte_ids(tokenizer, b"\xf0\x9f\x98\x80\xc3\xa9\xff")
        if "<0x00>" in tokenizer.get_vocab()
        else vocabulary
    )
    for _ in range(100):
        token_ids = rng.choices(
            rng.choice([vocabulary, bytes_, [*vocabulary[:3], *bytes_]]), k=rng.randrange(1, 120)
        )
        shown = check_stream(tokenizer, token_ids)
        if name in ("byte-level", "unigram", "word-piece"):
            assert shown[-1] == decode(tokenizer, token_ids)
        reader = Detokenizer(tokenizer, 0)
        for end in sorted(rng.sample(range(1, len(token_ids) + 1), len(token_ids) // 4)):
            assert reader.read(token_ids[:end], is_last=False) == shown[end - 1]


def test_what_was_shown_stays():
    """If one byte is invalid, the tokenizer turns its whole run to U+FFFD. Released text stays."""
    tokenizer = TOKENIZERS["llama"]
    good, bad = byte_ids(tokenizer, "é你".encode()), byte_ids(tokenizer, b"\xff")
    assert stream(tokenizer, good)[-2:] == ["é你"] * 2
    assert decode(tokenizer, good + bad) == "\ufffd" * 6
    assert stream(tokenizer, good + bad) == ["", "é", "é", "é", "é你", "é你", "é你\ufffd"]
    assert stream(tokenizer, good[:4] + bad)[-1] == "é" + "\ufffd" * 3
    assert stream(tokenizer, bad + good)[-1] == decode(tokenizer, bad + good) == "\ufffd" * 6
    assert stream(tokenizer, bad + encode(tokenizer, "a"))[-2:] == ["\ufffd a"] * 2
    assert Detokenizer(tokenizer, 0).read(good + bad, is_last=True) == "\ufffd" * 6, (
        "nothing was shown"
    )


LONG, SHORT = 3000, 9
# Where more than MAX_PENDING tokens without text stand in these, a character is cut, or a space is lost behind them.
CUT = {
    "a space, then special",
    "special, a space, special",
    "a word, special, a word",
    "split by special tokens",
}
CUT |= {"special, then split", "bytes, then text", "text after one wrong byte"}


def pathological(name, length):
    """Streams that keep tokens pending for long."""
    tokenizer = TOKENIZERS[name]
    vocabulary = tokenizer.get_vocab()
    special = [vocabulary["<s>"], vocabulary["</s>"]] * length
    space = encode(tokenizer, " ")[:1]
    word = encode(tokenizer, "the cat")
    streams = {
        "special": special + word,
        "a space, then special": space + special + word,
        "special, a space, special": special + space + special + word,
        "a word, special, a word": word + special + word,
        "spaces": space * length + word,
        "one character": encode(tokenizer, "a") * length,
    }
    if "<0x00>" in vocabulary or name == "byte-level":
        if name == "byte-level":
            characters = pre_tokenizers.ByteLevel(
                add_prefix_space=False, use_regex=False
            ).pre_tokenize_str("你")[0][0]
            han, wrong = [vocabulary[character] for character in characters], [vocabulary["\u0122"]]
        else:
            han, wrong = byte_ids(tokenizer, "你".encode()), byte_ids(tokenizer, b"\x80")
        streams |= {
            "bytes": wrong * length,
            "bytes, then text": wrong * length + han + word,
            "text after one wrong byte": wrong + han * (length // 3) + word,
            "split by special tokens": han[:1] + special[:length] + han[1:] + word,
            "special, then split": special[:length]
            + han[:2]
            + special[:length]
            + han[2:]
            + wrong * length
            + word,
            "characters": han * (length // 3) + word,
        }
    return streams


@pytest.mark.parametrize("length", [LONG, SHORT])
@pytest.mark.parametrize(
    "name", ["byte-level", "llama", "mistral", "gemma", "unigram", "unigram-first", "word-piece"]
)
def test_each_token_is_decoded_a_bounded_number_of_times(name, length, monkeypatch):
    tokenizer = TOKENIZERS[name]
    original = type(tokenizer).decode
    decoded: list[int] = []
    for kind, token_ids in pathological(name, length).items():
        whole = decode(tokenizer, token_ids)
        with monkeypatch.context() as patch:
            patch.setattr(
                type(tokenizer),
                "decode",
                lambda s, ids, **k: decoded.append(len(ids)) or original(s, ids, **k),
            )
            reader, shown, so_far = Detokenizer(tokenizer, 0), "", []
            for token_id in token_ids:
                so_far.append(token_id)
                before, shown = shown, reader.read(so_far, is_last=False)
                assert shown.startswith(before), kind
            assert max(decoded) <= 100 and sum(decoded) <= 60 * len(token_ids), kind
            last = reader.read(token_ids, is_last=True)
        decoded.clear()
        assert (last == whole) == whole.startswith(shown) and last.startswith(shown), kind
        is_cut = (
            kind in CUT
            if length == LONG
            else kind == "special, then split" and name != "byte-level"
        )
        assert last == whole or is_cut, kind


# --- stop strings


def expected_cut(texts, stops, asks):
    """The definition: the first token that completes a stop string, and the text before it."""
    for number, (end, may_stop) in enumerate(asks):
        known, text = ["", *texts][end - 1], texts[end - 1]
        starts = [text.find(stop, max(0, len(known) - len(stop) + 1)) for stop in stops]
        if may_stop and max(starts) >= 0:
            return number, text[: min(start for start in starts if start >= 0)]
    return None


@pytest.mark.parametrize("name", ["byte-level", "llama", "unigram", "word-piece"])
@many
@given(st.data())
def test_stop_strings_cut_where_the_definition_says(name, data):
    """Stop strings can overlap and contain each other. The text is read in between."""
    tokenizer = TOKENIZERS[name]
    letters = st.lists(st.sampled_from(["a", "b", "é", "the", " "]), min_size=1, max_size=4).map(
        "".join
    )
    token_ids = encode(tokenizer, "".join(["a", *data.draw(st.lists(letters, max_size=8))]))
    stops = tuple(data.draw(st.lists(letters, min_size=1, max_size=4)))
    texts = stream(tokenizer, token_ids)[:-1]
    asks = [(end, data.draw(st.booleans())) for end in range(1, len(token_ids) + 1)]
    # A token can end a stop string and begin a character that is not complete.
    prefixes = [token_ids[:end] for end in range(1, len(token_ids) + 1)]
    searched = [decode(tokenizer, prefix).rstrip("\ufffd") for prefix in prefixes]
    expected = expected_cut(searched, stops, asks)
    reader, shown = Detokenizer(tokenizer, 0, stops), ""
    for number, (end, may_stop) in enumerate(asks):
        if data.draw(st.booleans()):
            before, shown = shown, reader.read(token_ids[:end], is_last=False)
            assert shown.startswith(before)
        assert reader.meets_stop_string(token_ids[:end], may_stop) == (
            expected is not None and expected[0] == number
        )
        if expected is not None and expected[0] == number:
            assert expected[1].startswith(shown), "no stop string is shown in part"
            assert (
                reader.read(token_ids[:end], is_last=False)
                == reader.read(token_ids, is_last=True)
                == expected[1]
            )
            assert reader.meets_stop_string(token_ids, False), "and it stays so"
            return
        before, shown = shown, reader.read(token_ids[:end], is_last=False)
        assert shown == texts[end - 1][: max(0, len(texts[end - 1]) - max(map(len, stops)) + 1)]
    assert reader.read(token_ids, is_last=True) == decode(tokenizer, token_ids)


@pytest.mark.parametrize("max_tokens, reason, text", [(2, "stop", "a"), (1, "length", "a")])
def test_a_token_ends_a_stop_string_and_begins_a_character(max_tokens, reason, text):
    r"""GPT-2 has 59 tokens like b".\xe2". The text ends before the stop string, at that token."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: i for i, letter in enumerate([*sorted(letters), ".\u00e2"])}
    model = models.BPE(vocabulary, [(".", "\u00e2")])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    params = SamplingParams(stop=".", max_tokens=max_tokens)
    request = Request(0, [0], params, tokenizer=wrap(tokenizer))
    reasons = []
    for letter in ("a", ".\u00e2")[:max_tokens]:
        request.token_ids.append(vocabulary[letter])
        request.finish_reason = request.check_end()
        reasons.append(request.finish_reason)
        request.commit()
    assert reasons == [None] * (max_tokens - 1) + [reason]
    assert request.output()["text"] == text


@pytest.mark.parametrize(
    "stops",
    [
        ("a" * 50_000,),
        ("ab" * 25_000, "ba" * 25_000),
        tuple(f"ab{number}" for number in range(1000)),
    ],
    ids=["long", "periodic", "many"],
)
def test_a_step_costs_what_is_new(stops):
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = encode(tokenizer, stops[0][:1000])
    reader = Detokenizer(tokenizer, 0, stops)
    start = time.perf_counter()
    for end in range(1, len(token_ids)):
        assert (
            not reader.meets_stop_string(token_ids[:end], True)
            and reader.read(token_ids[:end], is_last=False) == ""
        )
    assert (time.perf_counter() - start) / len(token_ids) < 1e-3


# --- errors and interruptions


def feed(reader, token_ids, shown):
    """Feed the rest of a sequence. `shown` grows by what each token releases."""
    while len(shown) < len(token_ids):
        end = len(shown) + 1
        stops = reader.meets_stop_string(token_ids[:end], True)
        shown.append((stops, reader.read(token_ids[:end], is_last=end == len(token_ids))))


LIVES = [
    ("byte-level", "é的 a", ("at",)),
    ("llama", "éé你a", ("x",)),
    ("llama", "aé你 the cat", ("cataé", "sat")),
    ("unigram", "the cat", ()),
]


@each_tokenizer
def test_tokens_that_cannot_be_decoded(name, monkeypatch):
    """Each becomes U+FFFD. The text of the others, with leading spaces, does not change."""
    rng, tokenizer, bad = random.Random(0), TOKENIZERS[name], 10**6
    original = type(tokenizer).decode

    def decode_known(self, ids, **options):
        if bad in ids:
            raise OverflowError(bad)
        return original(self, ids, **options)

    monkeypatch.setattr(type(tokenizer), "decode", decode_known)
    for _ in range(50):
        pieces = [
            encode(tokenizer, text)
            for text in rng.choices(["the cat", " sat", "aé", "b ", "日本", "<tool>"], k=6)
        ]
        if any("\ufffd" in decode(tokenizer, piece) for piece in pieces):
            continue  # it has no token for one of these characters
        token_ids, expected = [], ""
        reader = Detokenizer(tokenizer, 0)
        for piece in pieces:
            before = reader.read(
                [token_id for token_id in token_ids if token_id != bad], is_last=False
            )
            token_ids += [*piece, bad]
            after = reader.read(
                [token_id for token_id in token_ids if token_id != bad], is_last=False
            )
            expected += after[len(before) :] + "\ufffd"
        shown = stream(tokenizer, token_ids)
        assert (
            shown[-1]
            == shown[-2]
            == expected
            == Detokenizer(tokenizer, 0).read(token_ids, is_last=True)
        )
        assert all(after.startswith(before) for before, after in pairwise(shown))
    half = encode(tokenizer, "é")[:1]
    if decode(tokenizer, half) == "\ufffd":
        assert stream(tokenizer, [*half, bad])[-1] == "\ufffd" * 2, (
            "a character that is cut by it stays incomplete"
        )


class LineInterrupts:
    """Raises KeyboardInterrupt at the lines numbered `targets` of functions that `covers` accepts."""

    def __init__(self, covers, *targets):
        self.covers = covers
        self.targets = targets
        self.num_lines = 0

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        if not self.covers(frame.f_code):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines in self.targets:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("name, text, stops", LIVES)
def test_interrupted_at_any_line(name, text, stops, monkeypatch):
    monkeypatch.setattr(Detokenizer, "MAX_PENDING", 4)
    tokenizer = TOKENIZERS[name]
    token_ids = [*encode(tokenizer, text), *[tokenizer.bos_token_id] * 6, *encode(tokenizer, text)]

    def is_the_detokenizers(code):
        return code.co_filename == module.__file__

    expected: list[Any] = []
    reader = Detokenizer(tokenizer, 0, stops)
    with LineInterrupts(is_the_detokenizers) as count:
        feed(reader, token_ids, expected)
    for target in range(1, count.num_lines + 1):
        shown: list[Any] = []
        reader = Detokenizer(tokenizer, 0, stops)
        with pytest.raises(KeyboardInterrupt), LineInterrupts(is_the_detokenizers, target):
            feed(reader, token_ids, shown)
        feed(reader, token_ids, shown)
        assert shown == expected, target
