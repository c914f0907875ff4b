"""Log probabilities as text: tokens join to the text, in whole replies and in streams."""

import json
import math
from itertools import chain

import pytest
from conftest import make_checkpoint
from server_helpers import parse_body, write
from tokenizer_helpers import SPECIAL, byte_fallback, byte_level

from nanovllm import LLM
from nanovllm.server.token_texts import list_tokens
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.generated_text import GeneratedText


@pytest.fixture(scope="module", params=[byte_level(), byte_fallback(strip=True)])
def llm(request, tmp_path_factory):
    """A random model whose tokenizer adds BOS to a text."""
    directory = tmp_path_factory.mktemp("model")
    request.param.add_bos_token = True
    make_checkpoint(directory, vocab_size=len(request.param), eos_token_id=None)
    request.param.save_pretrained(directory)
    # A prefix hit can change rounding.
    return LLM(str(directory), num_kvcache_blocks=64, enable_prefix_caching=False)


def ask(llm, is_chat=False, **body):
    """The reply to a request, or its chunks."""
    body = {"prompt": "the cat", "seed": 1, "max_tokens": 30, "logprobs": 3, **body}
    if is_chat:
        llm.tokenizer.chat_template = "{{ messages[0].content }}"
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        body |= {"logprobs": True, "top_logprobs": 3}
    prompts, reply = parse_body(llm, body, is_chat)
    llm.eos_token_ids = frozenset()
    return write(reply, llm._stream(prompts))


def ask_whole(llm, **body):
    (choice,) = ask(llm, **body)["choices"]
    json.loads(json.dumps(choice, allow_nan=False))
    return choice


def ask_stream(llm, **body):
    """The choices of the chunks."""
    return [chunk["choices"][0] for chunk in ask(llm, stream=True, **body)]


@pytest.mark.parametrize("seed", range(2))
def test_tokens_of_a_completion_join_to_its_text(llm, seed):
    choice = ask_whole(llm, seed=seed)
    found = choice["logprobs"]
    joined = "".join(token for token in found["tokens"] if token not in SPECIAL)
    assert joined == choice["text"]
    position = 0
    for index, token in enumerate(found["tokens"]):
        assert found["text_offset"][index] == position
        position += len(token) if token not in SPECIAL else 0
        top = found["top_logprobs"][index]
        assert len(top) in (3, 4), "no candidate is lost because it has the text of another"
        assert top[token] == found["token_logprobs"][index]


@pytest.mark.parametrize("options", [{}, {"stop": "zzzzzz"}, {"echo": True}], ids=str)
def test_a_stream_reports_the_same_tokens(llm, options):
    """Also while text is withheld, because it could begin a stop string."""
    expected = ask_whole(llm, **options)
    chunks = ask_stream(llm, **options)
    assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
    for name, values in expected["logprobs"].items():
        parts = [chunk["logprobs"][name] for chunk in chunks[:-1]]
        assert list(chain(*parts)) == values


def test_a_chat_lists_as_many_candidates_as_requested(llm):
    choice = ask_whole(llm, is_chat=True)
    content = choice["logprobs"]["content"]
    tokens = [entry["token"] for entry in content if entry["token"] not in SPECIAL]
    assert "".join(tokens) == choice["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        logprobs = [candidate["logprob"] for candidate in entry["top_logprobs"]]
        assert logprobs == sorted(logprobs, reverse=True)
    chunks = ask_stream(llm, is_chat=True)
    assert list(chain(*[chunk["logprobs"]["content"] for chunk in chunks[:-1]])) == content


def test_bytes_join_to_the_bytes_of_the_text(llm):
    """Also those of a character that has several tokens."""
    prompt, ids = [llm.tokenizer.encode(text, add_special_tokens=False) for text in ("a", "é你 a")]
    output = {
        "token_ids": ids,
        "logprobs": [{token_id: -0.5} for token_id in ids],
        "token_texts": GeneratedText(Detokenizer(llm.tokenizer, prompt)).list_pieces(ids, True),
    }
    llm.tokenizer.chat_template = "{{ messages[0].content }}"
    _, reply = parse_body(llm, {"messages": [{"role": "user", "content": "a"}]}, is_chat=True)
    content = reply.write_logprobs(list_tokens(llm.vocabulary, output, 0))["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in content)
    assert data.strip() == "é你 a".encode()
    assert "".join(entry["token"] for entry in content).strip() == "é你 a"
    assert any(entry["bytes"] == [0xA0] and entry["token"] == "你" for entry in content)


@pytest.mark.parametrize("prompt", ["the  cat", "axb", "é"])
def test_a_prompt_is_echoed_as_it_was_sent(llm, prompt):
    """Not with BOS, which the tokenizer adds, and with the space before the first new word."""
    choice = ask_whole(llm, prompt=prompt, echo=True, max_tokens=5)
    alone = ask_whole(llm, prompt=prompt, max_tokens=5)
    assert choice["text"] == prompt + alone["text"]
    found = choice["logprobs"]
    num_new = len(alone["logprobs"]["tokens"])
    assert found["tokens"][0] == "<s>"
    assert found["tokens"][-num_new:] == alone["logprobs"]["tokens"]
    offsets = [len(prompt) + offset for offset in alone["logprobs"]["text_offset"]]
    assert found["text_offset"][-num_new:] == offsets
    assert found["top_logprobs"][0] is None


def test_a_special_token_that_was_sent_as_text_has_text(llm):
    """The first token, which the tokenizer adds, has none."""
    prompt = "</s>axb"
    if llm.tokenizer.decode(llm.tokenizer.encode(prompt)) != f"<s>{prompt}":
        pytest.skip("this tokenizer adds a space, which was not sent")
    found = ask_whole(llm, prompt=prompt, echo=True, max_tokens=1)["logprobs"]
    assert found["tokens"][:2] == ["<s>", "</s>"]
    assert found["text_offset"][:3] == [0, 0, 4]
    assert found["text_offset"][-1] == len(prompt)


def test_a_prompt_of_ids_is_echoed_up_to_its_last_whole_character(llm):
    ids = llm.tokenizer.encode("a 你", add_special_tokens=False)
    for end in range(len(ids) - 2, len(ids)):
        choice = ask_whole(llm, prompt=ids[:end], echo=True, max_tokens=1, logprobs=None)
        assert choice["text"].startswith("a ")
        assert not choice["text"].startswith("a \ufffd\ufffd")


def test_minus_infinity_is_written_as_a_number(llm, monkeypatch):
    stream = llm._stream

    def with_infinity(prompts):
        for output in stream(prompts):
            for entry in output["logprobs"]:
                entry.update(dict.fromkeys(entry, -math.inf))
            yield output

    monkeypatch.setattr(llm, "_stream", with_infinity)
    for choice in (ask_whole(llm), ask_whole(llm, is_chat=True)):
        assert "-9999.0" in json.dumps(choice, allow_nan=False)
