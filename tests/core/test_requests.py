"""What a request can ask for: ends, penalties, log probabilities, n samples and beam search."""

import sys
from collections.abc import Iterator
from itertools import pairwise, product

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    Oracle,
    check_invariants,
    edit_weights,
    make_checkpoint,
    random_prompt,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import OPTConfig, PreTrainedTokenizerFast

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.penalties import Penalties
from nanovllm.engine.sequence import Sequence

EOS, STOP = 2, 7  # token ids of the scripted engine


@pytest.fixture(scope="module")
def demo():
    return LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=512)


@pytest.fixture
def say(demo, monkeypatch):
    """Stream the output of a model that samples these token ids whatever the logits are."""

    def say(token_ids, prompt_len=1, **params):
        script: Iterator[int] = iter([*token_ids, *[0] * 200])
        monkeypatch.setattr(
            ModelRunner, "run", lambda self, seqs: None
        )  # contexts too long to compute them for each case
        monkeypatch.setattr(
            ModelRunner, "sample", lambda self, logits, seqs: ([[next(script)]], None)
        )
        params = {"max_tokens": len(token_ids), **params}
        return list(demo.stream([0] * prompt_len, SamplingParams(**params)))

    return say


# --- when it ends


LETTERS = "abcdefgh"


@pytest.mark.parametrize(
    "token, params, prompt_len, num_tokens, reason, text",
    [  # the model says a b c d e f g h; `token` replaces the e, the fifth
        ("e", {}, 1, 8, "length", "abcdefgh"),
        ("eos", {}, 1, 5, "stop", "abcd"),
        ("eos", {"ignore_eos": True}, 1, 8, "length", "abcdfgh"),
        ("e", {"stop_token_ids": ["e"]}, 1, 5, "stop", "abcde"),
        ("e", {"stop_token_ids": ["e"], "ignore_eos": True}, 1, 5, "stop", "abcde"),
        ("e", {"stop": "e"}, 1, 5, "stop", "abcd"),
        ("e", {"stop": ["xyz", "cde", "h"]}, 1, 5, "stop", "ab"),
        ("e", {"stop": ["de", "cde"]}, 1, 5, "stop", "ab"),
        # at once: a stop token or string comes before max_tokens, and that before max_model_len
        ("eos", {"max_tokens": 5}, 1, 5, "stop", "abcd"),
        ("e", {"stop_token_ids": ["e"], "max_tokens": 5}, 1, 5, "stop", "abcde"),
        ("e", {"stop": "de", "max_tokens": 5}, 1, 5, "stop", "abc"),
        ("e", {"stop": "de"}, 2043, 5, "stop", "abc"),
        ("e", {"stop_token_ids": ["e"], "stop": "de"}, 1, 5, "stop", "abc"),
        ("e", {}, 2043, 5, "length", "abcde"),
        ("e", {"stop": "ef", "max_tokens": 5}, 1, 5, "length", "abcde"),
        # min_tokens: the first so many tokens end nothing
        ("eos", {"min_tokens": 4}, 1, 5, "stop", "abcd"),
        ("e", {"stop": "e", "min_tokens": 4}, 1, 5, "stop", "abcd"),
        ("e", {"stop": "e", "min_tokens": 5}, 1, 8, "length", "abcdefgh"),
        ("e", {"stop": "ef", "min_tokens": 5}, 1, 6, "stop", "abcd"),
        ("e", {"stop_token_ids": ["e"], "min_tokens": 5}, 1, 8, "length", "abcdefgh"),
    ],
)
def test_precedence(demo, say, token, params, prompt_len, num_tokens, reason, text):
    ids = [demo.tokenizer.convert_tokens_to_ids(letter) for letter in LETTERS]
    ids[4] = demo.tokenizer.eos_token_id if token == "eos" else ids[4]
    if "stop_token_ids" in params:
        params = {
            **params,
            "stop_token_ids": [
                demo.tokenizer.convert_tokens_to_ids(t) for t in params["stop_token_ids"]
            ],
        }
    assert demo.max_model_len == 2048
    output = say(ids, prompt_len, **params)[-1]
    assert (len(output["token_ids"]), output["finish_reason"], output["text"]) == (
        num_tokens,
        reason,
        text,
    )


@pytest.mark.parametrize(
    "text",
    [
        "naïve 你好 👩‍👩‍👧 é̂ fin",
        " a\ufffdb ",
        "日本語のテキスト",
        "👧👧👧👧👧👧👧👧👧👧👧👧👧👧👧👧",
    ],
)
def test_text_and_stop_strings_split_everywhere(demo, say, text):
    """Any part of the text as stop string cuts the text exactly, and is never shown in part."""
    ids = demo.tokenizer.encode(text)
    texts = [o["text"] for o in say(ids)]
    assert texts[-1] == text and all(text.startswith(shown) for shown in texts)
    for start, length in product(range(len(text)), (1, 2, 5)):
        stop = text[start : start + length]
        if len(stop) < length or "\ufffd" in stop:
            continue
        outputs = say(ids, stop=stop)
        expected = text[: text.index(stop)]
        assert outputs[-1]["text"] == expected and outputs[-1]["finish_reason"] == "stop"
        for before, after in pairwise(outputs):
            assert after["text"].startswith(before["text"])
        needed = len((expected + stop).encode())
        num_bytes = [
            len(demo.tokenizer.decode(ids[:n]).rstrip("\ufffd").encode())
            for n in range(1, len(ids) + 1)
        ]
        assert len(outputs[-1]["token_ids"]) == 1 + next(
            i for i, n in enumerate(num_bytes) if n >= needed
        )


def test_what_only_begins_like_a_stop_string_is_shown_in_the_end(demo, say):
    ids = [demo.tokenizer.convert_tokens_to_ids(letter) for letter in "abcabd"]
    texts = [o["text"] for o in say(ids, stop="abcx")]
    assert texts == ["", "", "", "a", "ab", "abcabd"], "as many characters wait as may begin one"
    assert [o["text"] for o in say(ids[:5], stop="abcx")][-1] == "abcab"


def test_bytes_that_are_no_text(demo, say):
    """Forty bytes without a character are shown after MAX_PENDING, and at the end as decoded."""
    vocabulary = demo.tokenizer.get_vocab()
    continuation = vocabulary["\u0122"]  # the byte-level alphabet's sign for byte 0x80
    assert demo.tokenizer.decode([continuation]) == "\ufffd"
    texts = [o["text"] for o in say([continuation] * 40)]
    assert texts[-1] == demo.tokenizer.decode([continuation] * 40) and len(texts[-2]) == 33


def test_detokenisation_is_linear(demo, say, monkeypatch):
    decoded = []
    decode = type(demo.tokenizer).decode
    monkeypatch.setattr(
        type(demo.tokenizer),
        "decode",
        lambda self, ids, **k: decoded.append(len(ids)) or decode(self, ids, **k),
    )
    say(demo.tokenizer.encode("你好" * 100), stop="!")
    assert sorted(decoded)[-2] <= 40, "but for the whole, once, in the end"


def test_min_tokens_bars_eos_in_the_model(tiny, make_llm):
    prompt = random_prompt(4, 7)
    llm = make_llm()
    first = tiny[1](prompt, 1)[0]
    llm.eos_token_ids = frozenset({first})
    output = llm.generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=20, min_tokens=10), use_tqdm=False
    )[0]
    assert first not in output["token_ids"][:10] and len(output["token_ids"]) >= 10
    assert llm.generate(prompt, SamplingParams(temperature=0.0), use_tqdm=False)[0][
        "token_ids"
    ] == [first]


def test_stop_needs_a_tokenizer(make_llm):
    with pytest.raises(ValueError, match="stop_token_ids"):
        make_llm().generate([1], SamplingParams(stop="x"))
    (output,) = make_llm().generate([1], SamplingParams(stop=[], max_tokens=2), use_tqdm=False)
    assert output["finish_reason"] == "length", "no stop strings need none"


# --- penalties


def penalized_greedy(model, prompt, params):
    """The definition of the penalties, one token and one vocabulary entry at a time."""
    token_ids = list(prompt)
    for _ in range(params.max_tokens):
        logits = model(torch.tensor([token_ids])).logits[0, -1].tolist()
        generated = token_ids[len(prompt) :]
        for token_id in range(len(logits)):
            if token_id in token_ids:
                factor = params.repetition_penalty
                logits[token_id] = (
                    logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
                )
            logits[token_id] -= params.frequency_penalty * generated.count(token_id)
            logits[token_id] -= params.presence_penalty * (token_id in generated)
        token_ids.append(max(range(len(logits)), key=lambda token_id: logits[token_id]))
    return token_ids[len(prompt) :]


@torch.inference_mode()
def test_penalties(tiny, make_llm):
    """Penalties hold in a batch with other requests, with and without preemptions."""
    kinds = [
        {}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.8}, {"repetition_penalty": 0.7},
        {"presence_penalty": -0.5, "frequency_penalty": 1.2, "repetition_penalty": 1.3},
    ]  # fmt: skip
    prompts = [random_prompt(i, 5 + i) for i in range(len(kinds))]
    params = [SamplingParams(temperature=0.0, max_tokens=14, **kind) for kind in kinds]
    expected = [penalized_greedy(tiny[1].model, prompt, p) for prompt, p in zip(prompts, params)]
    assert expected[1] != tiny[1](prompts[1], 14)
    for options in (
        {},
        {"num_kvcache_blocks": 7},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 3},
    ):
        llm = make_llm(**options)
        for _ in range(2):
            assert [
                o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)
            ] == expected, options
        assert "num_kvcache_blocks" not in options or llm.stats["num_preemptions"]


def test_penalties_change_a_sequences_own_tokens_only():
    """Neither other sequences nor the previous owner of a lane matter."""
    penalties, logits = Penalties(50, 20, torch.device("cpu")), torch.ones(2, 50)
    for prompts in ([1, 2, 3, 4, 5, 6], [7, 8]), ([9], [10, 11, 12]):
        seqs = [
            Sequence(i, prompt, SamplingParams(repetition_penalty=1.5))
            for i, prompt in enumerate(prompts)
        ]
        for lane, seq in enumerate(seqs):
            seq.lane = lane
        changed = penalties.apply(logits, seqs) != logits
        assert [row.nonzero().flatten().tolist() for row in changed] == list(prompts)


def test_penalties_cost_memory_where_they_are_asked_for(make_llm):
    """A row of counts is allocated for each lane that has used a penalty."""
    llm = make_llm()
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, frequency_penalty=float(i in (4, 6)))
        for i in range(7)
    ]
    outputs = llm.generate([[1 + i, 2] for i in range(7)], params, use_tqdm=False)
    assert len(llm.model_runner.penalties.counts) == 2
    params = SamplingParams(temperature=0.0, max_tokens=6, frequency_penalty=1.0)
    assert (
        llm.generate([[5, 2], [7, 2]], params, use_tqdm=False)[1]["token_ids"]
        == outputs[6]["token_ids"]
    )


def test_a_plain_batch_does_no_extra_work(make_llm, monkeypatch):
    llm = make_llm()
    monkeypatch.setattr(llm.model_runner, "penalties", None)
    monkeypatch.setattr("nanovllm.engine.model_runner.find_logprobs", None)
    llm.generate([[1, 2]] * 3, SamplingParams(top_p=0.9, n=2), use_tqdm=False)


# --- logprobs


@torch.inference_mode()
def test_logprobs_are_the_models_own(tiny, make_llm):
    prompts = [random_prompt(i, 6) for i in range(4)]
    params = [
        SamplingParams(seed=1, logprobs=3, max_tokens=8), SamplingParams(temperature=0.0, logprobs=0, max_tokens=8),
        SamplingParams(seed=2, max_tokens=8),
        SamplingParams(seed=3, logprobs=1000, repetition_penalty=1.5, top_k=4, max_tokens=8),
    ]  # fmt: skip
    for options in ({}, {"num_kvcache_blocks": 5, "max_model_len": 16}):
        outputs = make_llm(**options).generate(prompts, params, use_tqdm=False)
        assert outputs[2]["logprobs"] is None and outputs[2]["cumulative_logprob"] is None
        for prompt, p, output in zip(prompts, params, outputs):
            if p.logprobs is None:
                continue
            logits = (
                tiny[1]
                .model(torch.tensor([prompt + output["token_ids"]]))
                .logits[0, len(prompt) - 1 : -1]
            )
            reference = logits.log_softmax(-1)
            assert len(output["logprobs"]) == len(output["token_ids"]) == 8
            for row, token_id, entry in zip(reference, output["token_ids"], output["logprobs"]):
                top = row.topk(min(p.logprobs, VOCAB_SIZE)).indices.tolist()
                assert set(entry) == {*top, token_id} and list(entry)[: len(top)] == top
                for key, logprob in entry.items():
                    assert logprob == pytest.approx(float(row[key]), abs=1e-4)
            chosen = reference.gather(1, torch.tensor(output["token_ids"])[:, None]).sum()
            assert output["cumulative_logprob"] == pytest.approx(float(chosen), abs=1e-3)


def test_logprobs_in_a_stream(make_llm):
    llm = make_llm()
    outputs = list(llm.stream([1, 2, 3], SamplingParams(logprobs=1, max_tokens=4)))
    assert [len(o["logprobs"]) for o in outputs] == [1, 2, 3, 4]
    for o in outputs:
        assert o["cumulative_logprob"] == pytest.approx(
            sum(e[t] for e, t in zip(o["logprobs"], o["token_ids"]))
        )
    request_id = llm.add_request([1], SamplingParams(logprobs=1))
    llm.abort(request_id)
    assert [(o["logprobs"], o["cumulative_logprob"]) for o in llm.step()] == [([], 0)]


# --- n samples


@pytest.mark.parametrize("chunked", [True, False])
def test_samples_share_the_prompt(make_llm, chunked):
    llm = make_llm(enable_chunked_prefill=chunked)
    prompts = [random_prompt(0, 13), random_prompt(1, 9)]
    outputs = llm.generate(prompts, SamplingParams(n=3, seed=5, max_tokens=8), use_tqdm=False)
    assert [o["prompt_token_ids"] for o in outputs] == [prompts[0]] * 3 + [prompts[1]] * 3
    assert [o["sample_index"] for o in outputs] == [0, 1, 2] * 2
    assert [o["num_cached_tokens"] for o in outputs] == [0, 12, 12, 0, 8, 8]
    assert llm.stats["num_prefill_tokens"] == 13 + 9 + 4
    assert len({tuple(o["token_ids"]) for o in outputs}) == 6
    single = llm.generate(prompts[0], SamplingParams(seed=5, max_tokens=8), use_tqdm=False)[0]
    assert single["token_ids"] == outputs[0]["token_ids"], "sample 0 draws as n=1 does"
    again = make_llm(num_kvcache_blocks=9).generate(
        prompts, SamplingParams(n=3, seed=5, max_tokens=8), use_tqdm=False
    )
    assert [o["token_ids"] for o in again] == [o["token_ids"] for o in outputs]


def test_a_long_prompt_in_pieces_is_computed_once_for_all_samples(make_llm):
    llm = make_llm(max_num_batched_tokens=8)
    outputs = llm.generate(random_prompt(0, 33), SamplingParams(n=4, max_tokens=2), use_tqdm=False)
    assert [o["num_cached_tokens"] for o in outputs] == [0, 32, 32, 32]


def test_abort_costs_the_same_beside_any_number_of_requests(make_llm):
    def count_opcodes_of_abort(num_others):
        with make_llm(max_num_seqs=1) as llm:
            for _ in range(num_others):
                llm.add_request([1], SamplingParams(n=2))
            request_id = llm.add_request([1], SamplingParams(n=2))
            num_opcodes = 0

            def trace(frame, event, arg):
                nonlocal num_opcodes
                frame.f_trace_opcodes = True
                num_opcodes += event == "opcode"
                return trace

            sys.settrace(trace)
            llm.abort(request_id)
            sys.settrace(None)
            assert len(llm.requests) == 2 * num_others
            return num_opcodes

    assert count_opcodes_of_abort(2) == count_opcodes_of_abort(500)


def test_abort_ends_all_samples(make_llm):
    llm = make_llm(max_num_seqs=2)
    request_id = llm.add_request([1, 2, 3], SamplingParams(n=3))
    llm.step()
    llm.abort(request_id + 1)
    assert llm.stats["num_running"] + llm.stats["num_waiting"] == 2
    llm.abort(request_id)
    assert llm.is_finished()
    assert sorted(o["finish_reason"] for o in llm.step()) == ["abort"] * 3
    check_invariants(llm)


def test_seeds_of_samples_are_documented_functions():
    from nanovllm.engine.input_processor import _derive_seed

    assert len({_derive_seed(seed, index) for seed, index in product(range(30), range(30))}) == 900


# --- beam search


@pytest.fixture(scope="module", params=[None, 5], ids=["no-eos", "eos"])
def beams(tmp_path_factory, request):
    """A vocabulary of 12 tokens, so that beams end early and all texts can be listed."""
    directory = tmp_path_factory.mktemp("beams")
    model = make_checkpoint(directory, vocab_size=12, eos_token_id=request.param)
    return LLM(str(directory), num_kvcache_blocks=200, kvcache_block_size=4), model, request.param


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_beam_search_equals_transformers(beams, width, length_penalty):
    llm, model, eos = beams
    generator = torch.Generator().manual_seed(width)
    prompts = [
        torch.randint(6, 12, (length,), generator=generator).tolist() for length in (1, 4, 7, 8)
    ]
    found = llm.beam_search(prompts, width, 9, length_penalty)
    for prompt, outputs in zip(prompts, found):
        ids = torch.tensor([prompt])
        reference = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, max_new_tokens=9,
            do_sample=False, length_penalty=length_penalty, early_stopping=False, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        ) if width > 1 else None  # fmt: skip
        assert len(outputs) == width
        for i, output in enumerate(outputs):
            assert output["prompt_token_ids"] == prompt
            assert output["finish_reason"] == (
                "stop" if output["token_ids"][-1] == eos else "length"
            )
            if reference is not None:
                expected = reference.sequences[i, len(prompt) :].tolist()
                assert output["token_ids"] == expected[: len(output["token_ids"])]
                assert set(expected[len(output["token_ids"]) :]) <= {0, eos}
                score = output["cumulative_logprob"] / len(output["token_ids"]) ** length_penalty
                assert score == pytest.approx(float(reference.sequences_scores[i]), abs=1e-4)
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + output["token_ids"]])).logits[
                    0, len(prompt) - 1 : -1
                ]
            total = (
                logits.log_softmax(-1).gather(1, torch.tensor(output["token_ids"])[:, None]).sum()
            )
            assert output["cumulative_logprob"] == pytest.approx(float(total), abs=1e-4)
    assert llm.is_finished() and llm.stats["num_free_blocks"] == llm.stats["num_blocks"]


@torch.inference_mode()
def test_beam_search_is_exhaustive_if_wide_enough(beams):
    llm, model, _ = beams
    prompt, length = [7, 9, 8], 3
    best = llm.beam_search(prompt, 144, length, ignore_eos=True)[0][:20]
    texts = torch.cartesian_prod(*[torch.arange(12)] * length)
    rows = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], dim=1)
    logprobs = (
        model(rows)
        .logits[:, len(prompt) - 1 : -1]
        .log_softmax(-1)
        .gather(2, texts[:, :, None])
        .sum((1, 2))
    )
    values, order = logprobs.topk(20)
    assert [o["token_ids"] for o in best] == texts[order].tolist()
    assert [o["cumulative_logprob"] for o in best] == pytest.approx(values.tolist(), abs=1e-4)


def test_beams_share_their_past(beams):
    llm = beams[0]
    before = llm.stats
    llm.beam_search([7] * 40, 4, 12, ignore_eos=True)
    computed = (
        llm.stats["num_prefill_tokens"]
        + llm.stats["num_decode_tokens"]
        - before["num_prefill_tokens"]
        - before["num_decode_tokens"]
    )
    assert computed <= 40 + 4 * 12 * 4, "no more than a block per beam and step"


def test_beam_search_on_a_tight_pool(beams, tmp_path):
    llm, _, eos = beams
    make_checkpoint(tmp_path, vocab_size=12, eos_token_id=eos)
    tight = LLM(str(tmp_path), num_kvcache_blocks=7, kvcache_block_size=4, max_num_batched_tokens=5)
    prompts = [[7, 8, 9, 10, 11], [6, 6]]
    strip = [
        [(o["token_ids"], o["finish_reason"]) for o in outputs]
        for outputs in tight.beam_search(prompts, 3, 8)
    ]
    assert strip == [
        [(o["token_ids"], o["finish_reason"]) for o in outputs]
        for outputs in llm.beam_search(prompts, 3, 8)
    ]


@pytest.mark.parametrize("arguments", [(0, 3), (2, 0), (2.5, 3), (2, 3, "x"), (2, 3, 1.0, "no")])
def test_beam_search_options(beams, arguments):
    with pytest.raises((ValueError, TypeError)):
        beams[0].beam_search([1], *arguments)


# --- a server's loop


def test_many_requests_cost_what_they_are(make_llm):
    """The cost of a step depends on running requests, not on thousands of waiting ones."""
    llm = make_llm(max_num_seqs=4)
    ids = [
        llm.add_request([1 + i % 50, 2], SamplingParams(temperature=0.0, max_tokens=2))
        for i in range(3000)
    ]
    for request_id in reversed(ids[20:]):
        llm.abort(request_id)
    seen: dict[int, dict] = {}
    while not llm.is_finished():
        for output in llm.step():
            seen[output["request_id"]] = output
    assert sorted(seen) == ids
    assert [seen[i]["finish_reason"] for i in ids] == ["length"] * 20 + ["abort"] * 2980


def test_lanes_are_as_many_as_can_run(make_llm):
    """A running sequence holds a block, so more lanes than blocks would waste memory."""
    llm = make_llm(max_num_seqs=10**9)
    outputs = llm.generate(
        [[1 + i, 2] for i in range(90)],
        SamplingParams(temperature=0.0, max_tokens=2),
        use_tqdm=False,
    )
    assert [output["finish_reason"] for output in outputs] == ["length"] * 90
    assert (
        llm.model_runner.num_lanes == len(llm.scheduler.free_lanes) == llm.stats["num_blocks"] == 64
    )


def test_rules_are_the_sequences_own():
    """Stop tokens, min_tokens and max_tokens of a Sequence work without an engine."""
    seq = Sequence(
        0, [1], SamplingParams(max_tokens=4, min_tokens=1), stop_token_ids=frozenset({EOS, STOP})
    )
    reasons = []
    for token_id in (EOS, 3, STOP, 4):
        seq.token_ids.append(token_id)
        reasons.append(seq.check_end())
    assert reasons == [None, None, "stop", "length"]


@pytest.mark.parametrize("bound", [1e-6, 1e6])
def test_repetition_penalties_at_their_bounds_stay_finite(bound):
    """SamplingParams promises this for logits up to 1e32."""
    penalties, seq = (
        Penalties(2, 20, torch.device("cpu")),
        Sequence(0, [0, 1], SamplingParams(repetition_penalty=bound)),
    )
    seq.lane = 0
    changed = penalties.apply(torch.tensor([[1e32, -1e32]]), [seq])
    assert changed.isfinite().all()
    torch.testing.assert_close(changed, torch.tensor([[1e32 / bound, -1e32 * bound]]))


# --- numbers that are none


@pytest.fixture
def poisoned(tmp_path):
    """A checkpoint in which token 96 as input gives NaN."""
    oracle = Oracle(make_checkpoint(tmp_path, tie_word_embeddings=False))
    edit_weights(
        tmp_path,
        lambda weights: weights["model.embed_tokens.weight"][VOCAB_SIZE - 1].fill_(torch.nan),
    )
    return str(tmp_path), oracle


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"logprobs": 2, "repetition_penalty": 1.2}],
    ids=str,
)
def test_nan_logits_end_one_request(poisoned, dtype, params):
    llm = LLM(poisoned[0], dtype=dtype, num_kvcache_blocks=64, kvcache_block_size=4)
    healthy = [
        [token_id % 90 for token_id in prompt]
        for prompt in [random_prompt(i, 5 + i) for i in range(4)]
    ]
    shared = healthy[0] * 2
    prompts = [healthy[0], [*shared, VOCAB_SIZE - 1, 3], healthy[1], [VOCAB_SIZE - 1], shared]
    params = SamplingParams(max_tokens=6, seed=1, **params)
    barred = {
        "stop_token_ids": [VOCAB_SIZE - 1]
    }  # healthy requests may come to draw the token, which ends them here
    with pytest.warns(RuntimeWarning, match="request 1 ends with an error: its logits are NaN"):
        outputs = llm.generate(
            prompts, [SamplingParams(**{**vars(params), **barred})] * 5, use_tqdm=False
        )
    assert [o["finish_reason"] == "error" for o in outputs] == [False, True, False, True, False]
    for output in (outputs[1], outputs[3]):
        assert output["token_ids"] == [] and output["logprobs"] in (None, [])
    if dtype == "float32" and params.temperature == 0.0:
        for i in (0, 2, 4):
            token_ids = outputs[i]["token_ids"]
            assert token_ids == poisoned[1](prompts[i], len(token_ids))
    check_invariants(llm)


def test_beams_whose_logits_are_nan(poisoned):
    llm = LLM(poisoned[0], num_kvcache_blocks=64)
    with pytest.warns(RuntimeWarning, match="NaN"):
        failed, found = llm.beam_search([[VOCAB_SIZE - 1], [3, 4]], 2, 1)
    assert [(o["finish_reason"], o["token_ids"]) for o in failed] == [("error", [])]
    assert [o["finish_reason"] for o in found] == ["length"] * 2


# --- prompts as a family writes them: one BOS, chat templates, several tokens that end a text


SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA_TEMPLATE = (  # which writes BOS, as a Llama tokenizer does too
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi there"}]
TWO_TOKENS = SamplingParams(temperature=0.0, max_tokens=2)


def make_tokenizer(chat_template):
    """A tokenizer with a token per byte, which puts BOS before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate([*alphabet, *SPECIAL])}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(SPECIAL)
    bos = SPECIAL[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token="<|eot_id|>",
        chat_template=chat_template,
    )


def test_bos_comes_once(tmp_path):
    make_checkpoint(tmp_path, vocab_size=260)
    tokenizer = make_tokenizer(LLAMA_TEMPLATE)
    tokenizer.save_pretrained(tmp_path)
    llm, bos = LLM(str(tmp_path), num_kvcache_blocks=32), tokenizer.bos_token_id

    (chat,) = llm.chat(MESSAGES, TWO_TOKENS, use_tqdm=False)
    rendered = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert rendered.startswith("<|begin_of_text|><|start_header_id|>system")
    assert chat["prompt_token_ids"] == tokenizer.encode(rendered, add_special_tokens=False)
    assert chat["prompt_token_ids"].count(bos) == 1 and chat["prompt_token_ids"][0] == bos

    (text,) = llm.generate("hi there", TWO_TOKENS, use_tqdm=False)
    assert (
        text["prompt_token_ids"]
        == tokenizer.encode("hi there")
        == [bos, *map(tokenizer.convert_tokens_to_ids, "hiĠthere")]
    )


def test_no_template(tmp_path):
    """A tokenizer without a chat template still serves text prompts."""
    make_checkpoint(tmp_path, family=OPTConfig, ffn_dim=40, vocab_size=260)
    make_tokenizer(None).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), num_kvcache_blocks=32)
    with pytest.raises(ValueError, match="chat template: .*chat_template is not set"):
        llm.chat(MESSAGES)
    assert len(llm.generate("hi there", TWO_TOKENS, use_tqdm=False)[0]["token_ids"]) == 2


def test_several_tokens_end_a_text(tmp_path):
    """Each EOS token of generation_config.json ends a text, as in transformers."""
    oracle = Oracle(make_checkpoint(tmp_path))
    prompts = [random_prompt(seed, 9) for seed in range(2)]
    ends = [oracle(prompt, 8)[5] for prompt in prompts]
    oracle.known.clear()
    oracle.model.generation_config.eos_token_id = ends
    oracle.model.generation_config.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), num_kvcache_blocks=32)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [oracle(prompt, 20) for prompt in prompts]
    assert [output["finish_reason"] for output in outputs] == ["stop"] * 2
    assert {output["token_ids"][-1] for output in outputs} == set(ends) and len(set(ends)) == 2
