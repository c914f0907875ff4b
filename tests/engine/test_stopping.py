"""What ends a sequence, in which order, and what its text is then."""

from types import SimpleNamespace

import pytest
from conftest import generate_ids, greedy, random_prompt

from nanovllm import SamplingParams
from nanovllm.engine.model_runner import ModelRunner


@pytest.fixture
def say(demo, monkeypatch):
    """Stream the output of a model that samples these token ids, whatever the prompt is."""

    def say(token_ids, prompt_len=1, **params):
        script = iter(token_ids)
        monkeypatch.setattr(demo.model_runner, "forward", lambda step: None)  # saves its time
        monkeypatch.setattr(
            ModelRunner, "sample", lambda self, logits, step: SimpleNamespace(step=step)
        )
        monkeypatch.setattr(ModelRunner, "read", lambda self, sampled: ([[next(script)]], None))
        params = SamplingParams(**{"max_tokens": len(token_ids), **params})
        return list(demo.stream([0] * prompt_len, params))

    return say


A, E = 67, 71  # token ids of the demo model, where letters are consecutive
EOS, END_OF_TEXT = 2, 0  # both end a sequence


@pytest.mark.parametrize(
    "token, params, num_tokens, reason, text",
    [  # The model says a b c d e f g h, with `token` in place of e.
        (EOS, {}, 5, "stop", "abcd"),
        (END_OF_TEXT, {}, 5, "stop", "abcd"),
        (EOS, {"ignore_eos": True}, 8, "length", "abcdfgh"),
        (E, {"stop_token_ids": [E]}, 5, "stop", "abcd"),
        (E, {"stop_token_ids": [E], "ignore_eos": True}, 5, "stop", "abcd"),
        (E, {"stop_token_ids": [E], "stop": "x"}, 5, "stop", "abcd"),
        (E, {"stop": ["xyz", "de", "cde"]}, 5, "stop", "ab"),
        # One token can reach several ends. Stop strings come first, then stop tokens, max_tokens,
        # and max_model_len, which is 2048. The text of a stop token is left out.
        (E, {"stop_token_ids": [E], "stop": "de"}, 5, "stop", "abc"),
        (E, {"stop": "de", "max_tokens": 5}, 5, "stop", "abc"),
        (EOS, {"max_tokens": 5}, 5, "stop", "abcd"),
        (E, {"stop": "ef", "max_tokens": 5}, 5, "length", "abcde"),
        (E, {"prompt_len": 2043}, 5, "length", "abcde"),
        # The first min_tokens tokens end nothing.
        (EOS, {"min_tokens": 4}, 5, "stop", "abcd"),
        (E, {"stop_token_ids": [E], "min_tokens": 5}, 8, "length", "abcdefgh"),
        (E, {"stop": "e", "min_tokens": 4}, 5, "stop", "abcd"),
        (E, {"stop": "e", "min_tokens": 5}, 8, "length", "abcdefgh"),
        (E, {"stop": "ef", "min_tokens": 5}, 6, "stop", "abcd"),
    ],
)
def test_the_first_end_counts(say, token, params, num_tokens, reason, text):
    token_ids = [*range(A, A + 8)]
    token_ids[4] = token
    output = say(token_ids, **params)[-1]
    assert len(output["token_ids"]) == num_tokens
    assert output["finish_reason"] == reason
    assert output["text"] == text


def test_min_tokens_bans_eos(tiny, make_llm):
    prompt = random_prompt(4, 7)
    llm = make_llm()
    (eos,) = tiny[1](prompt, 1)
    llm.eos_token_ids = frozenset({eos})
    assert generate_ids(llm, prompt, greedy(20)) == [[eos]]
    for min_tokens in (1, 10):
        params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=min_tokens)
        (token_ids,) = generate_ids(llm, prompt, params)
        assert eos not in token_ids[:min_tokens]


def test_stop_strings_need_a_tokenizer(make_llm):
    llm = make_llm()
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.generate([1], SamplingParams(stop="x"))
    (output,) = llm.generate([1], SamplingParams(stop=[]))
    assert output["text"] == ""


def test_the_start_of_a_stop_string_is_withheld(demo, say):
    """As many characters are withheld as could begin one."""
    ids = demo.tokenizer.convert_tokens_to_ids(list("abcabd"))
    texts = [output["text"] for output in say(ids, stop="abcx")]
    assert texts == ["", "", "", "a", "ab", "abcabd"]


def test_bytes_without_a_character_are_shown_at_last(demo, say):
    """Bytes that begin a character are withheld, but no more than 32 tokens and not at the end."""
    byte = demo.tokenizer.get_vocab()["\u0122"]  # the byte-level alphabet's sign for byte 0x80
    texts = [output["text"] for output in say([byte] * 40)]
    assert texts[31] == ""
    assert texts[-2] == "\ufffd" * 33
    assert texts[-1] == "\ufffd" * 40
