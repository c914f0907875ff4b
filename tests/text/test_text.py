"""Tokens become text, for each kind of tokenizer: while it is streamed, at the end, and with stop
strings.
"""

import random
import sys
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import DEFAULT, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_helpers import BYTES, LETTERS, WORDS, byte_fallback, byte_level, wrap
from tokenizers import decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer

from nanovllm.text import detokenizer, generated_text
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.generated_text import GeneratedText
from nanovllm.text.vocabulary import Vocabulary

ALPHABET = [*"abt  é你好👩\u200dÿ\n▁\u0302", "the cat", " sat", "日本語", "\ufffd"]


def unigram():
    """As in T5: a sign for the space, no bytes."""
    vocabulary = [(token, -2.0) for token in ["<unk>", "▁", "▁the", *WORDS]]
    return wrap(models.Unigram(vocabulary, 0), decoders.Metaspace(), pre_tokenizers.Metaspace())


TOKENIZERS = {
    "byte-level": byte_level(),
    "llama": byte_fallback(strip=True),
    "gemma": byte_fallback(strip=False),
    "unigram": unigram(),
    "byt5": ByT5Tokenizer(),  # in Python; leaves out what is no text
}
DECODE = Detokenizer._decode
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def decode(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def byte_ids(name, data):
    """The tokens of single bytes, or none if the tokenizer has no such tokens."""
    names = {"byte-level": LETTERS, "llama": BYTES, "gemma": BYTES}
    if name not in names:
        return []
    return TOKENIZERS[name].convert_tokens_to_ids([names[name][byte] for byte in data])


def make_reader(tokenizer, prompt=(), stops=(), hidden_ids=None):
    return GeneratedText(Detokenizer(tokenizer, list(prompt), hidden_ids), tuple(stops))


def stream(tokenizer, token_ids, prompt=(), hidden_ids=None):
    """The text shown after each token, and at the end. It must be append-only until then."""
    reader = make_reader(tokenizer, prompt, hidden_ids=hidden_ids)
    shown = []
    for end in range(1, len(token_ids) + 1):
        shown.append(reader.read(token_ids[:end], is_last=False))
        assert "".join(reader.list_pieces(token_ids[:end], is_last=False)) == shown[-1]
    shown.append(reader.read(token_ids, is_last=True))
    for before, after in pairwise(shown):
        assert after.startswith(before)
    return shown


def check_stream(tokenizer, token_ids):
    *shown, last = stream(tokenizer, token_ids)
    for end, text in enumerate(shown, 1):
        complete = decode(tokenizer, token_ids[:end])
        if "\ufffd" not in complete:
            assert text == complete, "text is held back without need"
    whole = decode(tokenizer, token_ids)
    assert make_reader(tokenizer).read(token_ids, is_last=True) == whole
    assert last == whole or not whole.startswith(shown[-1])
    return shown, last == whole


# --- the text


@each_tokenizer
def test_text_grows_to_what_the_tokenizer_says(name):
    rng = random.Random(0)
    tokenizer = TOKENIZERS[name]
    for _ in range(60):
        rare = [chr(rng.randrange(0x80, 0xD800)), chr(rng.randrange(0x10000, 0x20000))]
        token_ids = encode(tokenizer, "".join(rng.choices([*ALPHABET, *rare], k=20)))
        _, is_whole = check_stream(tokenizer, token_ids)
        assert is_whole


@each_tokenizer
def test_tokens_that_are_no_text(name):
    """Invalid bytes, parts of words, and special tokens within a character. Strides change nothing.

    A tokenizer can contradict itself.
    """
    rng = random.Random(0)
    tokenizer = TOKENIZERS[name]
    vocabulary = list(tokenizer.get_vocab().values())
    few = byte_ids(name, b"\xf0\x9f\x98\x80\xc3\xa9\xff") or vocabulary
    special = encode(tokenizer, "<s></s><tool>")
    for _ in range(90):
        choices = rng.choice([vocabulary, few, [*special, *few]])
        token_ids = rng.choices(choices, k=rng.randrange(1, 120))
        shown, is_whole = check_stream(tokenizer, token_ids)
        assert is_whole or name == "byt5" or decode(tokenizer, token_ids).count("\ufffd") > 1
        reader = make_reader(tokenizer)
        for end in sorted(rng.sample(range(1, len(token_ids) + 1), len(token_ids) // 4)):
            assert reader.read(token_ids[:end], is_last=False) == shown[end - 1]


@each_tokenizer
@pytest.mark.parametrize("length", [0, 1, 5, 60])
def test_text_continues_the_prompt(name, length):
    """With leading spaces. A character that the prompt begins is part of the text."""
    rng = random.Random(length)
    tokenizer = TOKENIZERS[name]
    special = encode(tokenizer, "<s>")
    for _ in range(40):
        token_ids = encode(tokenizer, "a" + "".join(rng.choices([*ALPHABET, " the"], k=10)))
        prompt = special * rng.choice([0, 1, 30]) + rng.choices(token_ids, k=length)
        split = rng.randrange(1, len(token_ids))
        prompt += token_ids[:split]
        generated = token_ids[split:]
        whole = decode(tokenizer, prompt + generated)
        if "\ufffd" not in whole:
            starts = [decode(tokenizer, prompt[: len(prompt) - num]) for num in range(4)]
            complete = next(start for start in starts if not start.endswith("\ufffd"))
            assert complete + stream(tokenizer, generated, prompt)[-1] == whole


@each_tokenizer
def test_special_tokens_can_be_text(name):
    tokenizer = TOKENIZERS[name]
    special = Vocabulary(tokenizer).special_ids
    first, *others = encode(tokenizer, "a the<s> cat</s>\u4f60")
    end = tokenizer.eos_token_id
    assert end in special
    without_special = stream(tokenizer, others, [first])
    assert stream(tokenizer, others, [first], frozenset(special)) == without_special
    assert "</s>" not in without_special[-1]
    assert "</s>" in stream(tokenizer, others, [first], frozenset(special - {end}))[-1]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(b"a.\xff\x80\xc3\xa9\xe4\xbd\xa0\xf0\x9f"), max_size=12),
    st.integers(0, 12),
    st.sampled_from([(), ("zz",), ("aaa", "\ufffd\ufffd\ufffda"), ("z" * 9,)]),
)
def test_any_bytes_only_grow_to_what_the_tokenizer_says(data, split, stops):
    """Also if the prompt ends with bytes that are no characters."""
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = byte_ids("byte-level", bytes(data))
    prompt = token_ids[:split]
    generated = token_ids[split:]
    reader = make_reader(tokenizer, prompt, stops)
    shown = ""
    has_ended = False
    end = len(prompt)
    for num_tokens in range(1, len(generated) + 1):
        end = len(prompt) + num_tokens
        has_ended = reader.meets_stop_string(generated[:num_tokens], True)
        text = reader.read(generated[:num_tokens], is_last=False)
        assert text.startswith(shown)
        shown = text
        if has_ended:
            break
    given = token_ids[len(prompt) : end]
    last = reader.read(given, is_last=True)
    assert last.startswith(shown)
    whole = make_reader(tokenizer, prompt).read(given, is_last=True)
    assert "".join(reader.list_pieces(given, is_last=True)) == whole
    assert last == whole[: len(last)] if has_ended else last == whole
    # A character that the prompt begins belongs to the text, so the prompt's U+FFFD is not in it.
    starts = range(len(prompt), max(-1, len(prompt) - 4), -1)
    for start in starts:
        if not decode(tokenizer, prompt[:start]).endswith("\ufffd"):
            rest = decode(tokenizer, token_ids[start:end])
            assert rest.endswith(whole)
            assert decode(tokenizer, prompt[start:]).startswith(rest.removesuffix(whole))
            break


def make_pathological(name, length):
    """Streams that keep tokens pending for long: those whose text is kept, and others."""
    tokenizer = TOKENIZERS[name]
    special = encode(tokenizer, "<s></s>") * (length // 2)
    space = encode(tokenizer, " ")[:1]
    word = encode(tokenizer, "the cat")
    kept = [special + word, space * length + word, encode(tokenizer, "a") * length]
    others = [space + special + word, special + space + special + word, word + special + word]
    han = byte_ids(name, "你".encode())
    wrong = byte_ids(name, b"\x80")
    if han:
        kept += [wrong * length, han * length + word]
        others.append(wrong * length + han + word)
        others.append(wrong + han * (length // 3) + word)
        others.append(special + han[:2] + special + han[2:] + word + wrong * length + word)
    return kept, others


@pytest.mark.parametrize("length", [500, 9])
@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma", "unigram"])
def test_each_token_is_decoded_a_bounded_number_of_times(name, length):
    """A character or a space can be lost only after more than MAX_PENDING tokens."""
    tokenizer = TOKENIZERS[name]
    kept, others = make_pathological(name, length)
    for token_ids in kept + others:
        with patch.object(Detokenizer, "_decode", autospec=True, side_effect=DECODE) as calls:
            *_, shown, last = stream(tokenizer, token_ids)
        sizes = [len(call.args[1]) for call in calls.call_args_list[:-1]]  # the last one is final
        assert max(sizes) <= 100
        assert sum(sizes) <= 60 * len(token_ids)
        whole = decode(tokenizer, token_ids)
        assert (last == whole) == whole.startswith(shown)
        assert last == whole or (token_ids in others and length > 9)


# --- stop strings


@pytest.mark.parametrize("name", ["byte-level", "llama", "unigram"])
def test_the_text_ends_before_the_first_stop_string(name):
    """Stop strings can overlap and contain each other, and are not always allowed to stop."""
    rng = random.Random(0)
    tokenizer = TOKENIZERS[name]
    letters = ["a", "b", "é", "the", " ", ".", "—"]
    for _ in range(150):
        token_ids = encode(tokenizer, "a" + "".join(rng.choices(letters, k=rng.randrange(20))))
        first, *others = rng.choices(letters, k=rng.randint(2, 4))
        suffix = "".join(others)
        stops = [suffix, first + suffix, rng.choice(letters)]
        num_withheld = max(map(len, stops)) - 1
        reader = make_reader(tokenizer, stops=stops)
        expected = decode(tokenizer, token_ids)
        known = ""
        shown = ""
        for end, released in enumerate(stream(tokenizer, token_ids)[:-1], 1):
            given = token_ids[:end]
            # A token can end a stop string and begin a character that is not complete.
            text = max(released, decode(tokenizer, given).rstrip("\ufffd"), key=len)
            found = [text.find(stop, max(0, len(known) - len(stop) + 1)) for stop in stops]
            starts = [start for start in found if start >= 0]
            known = text
            may_stop = rng.random() < 0.5
            has_ended = may_stop and bool(starts)
            assert reader.meets_stop_string(given, may_stop) == has_ended
            if has_ended:
                expected = text[: min(starts)]
                assert expected.startswith(shown), "part of a stop string is shown"
                assert reader.read(given, is_last=False) == expected
                break
            shown = reader.read(given, is_last=False)
            assert shown == released[: max(0, len(released) - num_withheld)]
        assert reader.read(token_ids, is_last=True) == expected


@each_tokenizer
def test_pieces_go_on_behind_the_end_of_the_text(name):
    """A stop string and a stop token have pieces, which the text leaves out."""
    token_ids = encode(TOKENIZERS[name], "the cat")
    reader = make_reader(TOKENIZERS[name], stops=["t"])
    assert reader.meets_stop_string(token_ids, may_stop=True)
    assert reader.read(token_ids, is_last=True) == "the ca"
    assert "".join(reader.list_pieces(token_ids, is_last=True)) == "the cat"
    reader = make_reader(TOKENIZERS[name])
    text = reader.read(token_ids[:-1], is_last=True)
    *others, last = reader.list_pieces(token_ids, is_last=True)
    assert "".join(others) == text
    assert text + last == "the cat"
    assert reader.read(token_ids[:-1], is_last=True) == text


# --- errors and interrupts

BAD = 10**6


@each_tokenizer
def test_a_token_that_cannot_be_decoded_becomes_a_replacement_character(name):
    """The text of the others, with leading spaces, does not change."""
    rng = random.Random(0)
    tokenizer = TOKENIZERS[name]
    original = tokenizer.decode

    def decode_or_fail(token_ids, **options):
        if BAD in token_ids:
            raise OverflowError(BAD)
        return original(token_ids, **options)

    texts = ["the cat", " sat", "aé", "b ", "日本", "<tool>"]
    with patch.object(tokenizer, "decode", decode_or_fail):
        for _ in range(50):
            reader = make_reader(tokenizer)
            good = []
            token_ids = []
            shown = ""
            expected = ""
            for piece in [encode(tokenizer, text) for text in rng.choices(texts, k=6)]:
                good += piece
                token_ids += [*piece, BAD]
                text = reader.read(good, is_last=False)
                expected += text[len(shown) :] + "\ufffd"
                shown = text
            assert stream(tokenizer, token_ids)[-2:] == [expected] * 2
            assert make_reader(tokenizer).read(token_ids, is_last=True) == expected
        half = encode(tokenizer, "é")[:1]
        if decode(tokenizer, half) == "\ufffd":
            assert stream(tokenizer, [*half, BAD])[-1] == "\ufffd" * 2, "the half character stays"
            rest = [*half, BAD, *encode(tokenizer, "a")]
            assert stream(tokenizer, rest)[-1].replace(" ", "") == "\ufffd" * 2 + "a"


def test_an_exception_that_the_tokenizer_does_not_raise_again_is_not_its_own():
    """Such as that of a signal handler. Nothing of the text is lost."""
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = encode(tokenizer, "the cat")
    original = tokenizer.decode
    for num_calls in range(4):
        reader = make_reader(tokenizer)
        effects = [*[DEFAULT] * num_calls, TimeoutError, *[DEFAULT] * 30]
        failing = patch.object(tokenizer, "decode", wraps=original, side_effect=effects)
        with failing, pytest.raises(TimeoutError):
            reader.read(token_ids, is_last=False)
        assert reader.read(token_ids, is_last=True) == "the cat"


@contextmanager
def interrupt_at(target, lines):
    """Raise KeyboardInterrupt at line number `target` of the text. Lists lines in `lines`."""

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in (detokenizer.__file__, generated_text.__file__):
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == target:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def feed(reader, token_ids, shown):
    """Feed the rest of a sequence, until it ends. `shown` grows by what each token releases."""
    for end in range(len(shown) + 1, len(token_ids) + 1):
        given = token_ids[:end]
        is_last = end == len(token_ids)
        has_ended = reader.meets_stop_string(given, may_stop=True)
        text = reader.read(given, is_last)
        shown.append((has_ended, text, reader.list_pieces(given, is_last)))
        if has_ended:
            break


@pytest.mark.parametrize(
    "name, text, stops",
    [
        ("byte-level", "é的 a", ("at",)),
        ("llama", "é你 a", ("a é", "x")),
        ("unigram", "the cat", ()),
    ],
)
def test_an_interrupt_at_any_line_changes_no_text(name, text, stops, monkeypatch):
    monkeypatch.setattr(Detokenizer, "MAX_PENDING", 2)
    tokenizer = TOKENIZERS[name]
    token_ids = encode(tokenizer, text + "<s>" * 3 + text)
    expected = []
    lines = []
    reader = make_reader(tokenizer, stops=stops)
    with interrupt_at(0, lines):
        feed(reader, token_ids, expected)
    for target in range(1, len(lines) + 1):
        reader = make_reader(tokenizer, stops=stops)
        shown = []
        with pytest.raises(KeyboardInterrupt), interrupt_at(target, []):
            feed(reader, token_ids, shown)
        reader.roll_back(len(shown))
        feed(reader, token_ids, shown)
        assert shown == expected, target
