"""Drafts change no token, whatever is proposed and however often it is accepted."""

import random
import timeit
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    check_invariants,
    edit_weights,
    greedy,
    make_batch,
    make_checkpoint,
    random_prompt,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, OPTConfig, Qwen3MoeConfig

from nanovllm import DEMO_MODEL, LLM, SamplingParams, trace
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.speculation import PromptLookup, Proposal, Speculator, measure_steps
from nanovllm.kernels.cpu import attention as cpp

FREE = [0.0, *[1.0] * 256]  # costs of steps where drafts cost nothing


class Clairvoyant:
    """Proposes the tokens of an engine without drafts, or with some probability random ones."""

    def __init__(self, outputs, share_right):
        self.answers = [output["prompt_token_ids"] + output["token_ids"] for output in outputs]
        self.share_right, self.random = share_right, random.Random(0)

    def __call__(self, token_ids):
        proposer = Clairvoyant([], self.share_right)
        proposer.answers, proposer.random, proposer.token_ids = self.answers, self.random, token_ids
        return proposer

    def propose(self, num_tokens):
        length = len(self.token_ids)
        answer = next((answer for answer in self.answers if answer[:length] == self.token_ids), [])
        rights = answer[length : length + num_tokens]
        return [
            token if self.random.random() < self.share_right else self.random.randrange(VOCAB_SIZE)
            for token in rights
        ]


def use_proposer(llm, proposer):
    """Make `llm` use this proposer, and draft at any cost."""
    speculator = llm.scheduler.speculator
    assert speculator is not None
    speculator.make_proposer, speculator.plain_costs, speculator.draft_costs = proposer, FREE, FREE


def watch(llm):
    """Check after every step that drafts leave no blocks behind and list no wrong ones."""
    postprocess = llm.scheduler.postprocess

    def check(seqs, samples):
        postprocess(seqs, samples)
        manager = llm.scheduler.block_manager
        for seq in llm.scheduler.running:
            if seq in seqs and seq.num_logits > 0:
                assert len(seq.block_table) == -(-seq.num_computed_tokens // manager.block_size), (
                    "what a draft took is back"
                )
            listed = [
                seq.token_ids[i : i + manager.block_size]
                for i in range(0, seq.num_computed_tokens, manager.block_size)
            ]
            for block_id, tokens in zip(seq.block_table, listed):
                assert (
                    manager.blocks[block_id].hash == -1
                    or manager.blocks[block_id].token_ids == tokens
                )

    llm.scheduler.postprocess = check  # type: ignore[method-assign]


def same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for key in ("token_ids", "text", "finish_reason"):
            assert one[key] == other[key]
        for entry, expected in zip(one["logprobs"] or [], other["logprobs"] or [], strict=True):
            assert entry == pytest.approx(expected, abs=1e-4)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_drafts_change_no_token(tiny, data):
    """Tokens, ends and log probabilities are those without drafts, for any load, pool and policy."""
    draw = data.draw
    options = dict(
        kvcache_block_size=draw(st.sampled_from([2, 4, 5])),
        num_kvcache_blocks=draw(st.integers(16, 40)),
        max_num_batched_tokens=draw(st.sampled_from([24, 30, 64])),
        max_num_seqs=draw(st.integers(1, 5)),
        enable_chunked_prefill=draw(st.booleans()),
        enable_prefix_caching=draw(st.booleans()),
    )
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0]),
        top_p=st.sampled_from([1.0, 0.9]),
        top_k=st.sampled_from([-1, 5]),
        max_tokens=st.integers(1, 12),
        logprobs=st.sampled_from([None, 2]),
        seed=st.integers(0, 2),
        n=st.integers(1, 2),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
        min_tokens=st.integers(0, 1),
    )
    load = draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 15), params), min_size=1, max_size=6)
    )
    prompts, wishes = (
        [random_prompt(seed, length) for seed, length, _ in load],
        [params for *_, params in load],
    )
    expected = LLM(tiny[0], **options).generate(prompts, wishes, use_tqdm=False)
    llm = LLM(tiny[0], num_speculative_tokens=draw(st.sampled_from([1, 3, 8])), **options)
    use_proposer(llm, Clairvoyant(expected, draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))))
    watch(llm)
    for _ in range(2):  # with a cold cache, then with a warm one
        same(llm.generate(prompts, wishes, use_tqdm=False), expected)
        check_invariants(llm)
    stats = llm.stats
    assert (
        stats["num_accepted_tokens"] <= stats["num_draft_tokens"]
        and stats["num_free_blocks"] == stats["num_blocks"]
    )


@pytest.mark.parametrize("share_right", [0.0, 0.5, 1.0])
def test_a_right_guess_saves_a_step(tiny, make_llm, share_right):
    prompt = random_prompt(1, 9)
    expected = make_llm().generate(prompt, greedy(41), use_tqdm=False)
    assert expected[0]["token_ids"] == tiny[1](prompt, 41)
    llm = make_llm(num_speculative_tokens=4)
    use_proposer(llm, Clairvoyant(expected, share_right))
    num_steps = 0
    llm.add_request(prompt, greedy(41))
    while not llm.is_finished():
        (output,) = llm.step()
        num_steps += 1
    same([output], expected)
    stats = llm.stats
    assert stats["num_decode_tokens"] == 40 and stats["num_accepted_tokens"] == 41 - num_steps
    assert {0.0: num_steps == 41, 0.5: 12 < num_steps < 40, 1.0: num_steps == 9}[share_right]


@pytest.mark.parametrize("family", [LlamaConfig, OPTConfig, Qwen3MoeConfig])
@pytest.mark.parametrize("enable_kernels", [True, False])
def test_families(tmp_path, family, enable_kernels):
    of_family: dict[str, Any] = {}
    if family is OPTConfig:
        of_family = dict(ffn_dim=48, word_embed_proj_dim=32)
    if family is Qwen3MoeConfig:
        of_family = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    make_checkpoint(tmp_path, family=family, **of_family)
    options = dict(num_kvcache_blocks=64, kvcache_block_size=4, enable_kernels=enable_kernels)
    prompts = [random_prompt(seed, 5 + seed) for seed in range(4)]
    params = SamplingParams(temperature=0.5, max_tokens=20, seed=3, logprobs=1)
    expected = LLM(str(tmp_path), **options).generate(prompts, params, use_tqdm=False)
    llm = LLM(str(tmp_path), num_speculative_tokens=3, **options)
    use_proposer(llm, Clairvoyant(expected, 0.7))
    same(llm.generate(prompts, params, use_tqdm=False), expected)
    assert 0 < llm.stats["num_accepted_tokens"] < llm.stats["num_draft_tokens"]


def test_two_ranks(tiny, make_llm):
    prompts = [random_prompt(seed, 7) for seed in range(3)]
    with make_llm(num_speculative_tokens=3, tensor_parallel_size=2) as llm:
        expected = make_llm().generate(prompts, greedy(20), use_tqdm=False)
        use_proposer(llm, Clairvoyant(expected, 0.7))
        same(llm.generate(prompts, greedy(20), use_tqdm=False), expected)
        assert llm.stats["num_accepted_tokens"] > 0


def test_ends_within_an_accepted_draft():
    """Nothing after a stop string, EOS or max_tokens is reported, and streamed text is append-only."""
    make = lambda **options: LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=64, **options)  # noqa: E731
    plain, llm = make(), make(num_speculative_tokens=6)
    prompt = plain.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count from 3 to 9."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    whole = plain.generate(prompt, free, use_tqdm=False)
    text = whole[0]["text"]
    use_proposer(llm, Clairvoyant(whole, 1.0))
    cases = [
        SamplingParams(temperature=0.0, max_tokens=40, stop=[text[9:12]]),
        SamplingParams(temperature=0.0, max_tokens=40, stop=[text[4:6], text[8:10]], min_tokens=4),
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
    ]
    for params in cases:
        same(
            llm.generate(prompt, params, use_tqdm=False),
            plain.generate(prompt, params, use_tqdm=False),
        )
        texts = [output["text"] for output in llm.stream(prompt, params)]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert llm.stats["num_accepted_tokens"] > 20
    beams = [engine.beam_search([prompt], 2, 6)[0] for engine in (plain, llm)]
    same(*beams)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_rejected_draft_token_may_have_nan(tmp_path, make_llm, backend):
    """A rejected draft token with NaN ends no request, although NaN reaches the tokens before it."""
    make_checkpoint(tmp_path, tie_word_embeddings=False)
    edit_weights(
        tmp_path,
        lambda weights: weights["model.embed_tokens.weight"][VOCAB_SIZE - 1].fill_(torch.nan),
    )

    class Poisoner:
        def __init__(self, token_ids): ...

        def propose(self, num_tokens):
            return [VOCAB_SIZE - 1] * num_tokens

    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [random_prompt(seed, 6) for seed in range(3)]
    prompts = [[token_id % (VOCAB_SIZE - 1) for token_id in prompt] for prompt in prompts]
    expected = make_llm(str(tmp_path)).generate(prompts, params, use_tqdm=False)
    assert not any(VOCAB_SIZE - 1 in output["token_ids"][:-1] for output in expected)
    llm = make_llm(str(tmp_path), num_speculative_tokens=2, attention_backend=backend)
    use_proposer(llm, Poisoner)
    same(llm.generate(prompts, params, use_tqdm=False), expected)
    assert llm.stats["num_draft_tokens"] > 0


def test_nan_logits_end_a_request_although_drafts_are_cheap(tmp_path, make_llm):
    """The step after NaN logits has no draft, whatever drafts cost. NaN is then the request's."""
    make_checkpoint(tmp_path, tie_word_embeddings=False)
    edit_weights(tmp_path, lambda weights: weights["model.embed_tokens.weight"][5].fill_(torch.nan))

    class Proposer:
        def __init__(self, token_ids): ...

        def propose(self, num_tokens):
            return [7] * num_tokens

    llm = make_llm(str(tmp_path), num_speculative_tokens=2)
    use_proposer(llm, Proposer)
    speculator = llm.scheduler.speculator
    assert speculator is not None
    speculator.draft_costs = [cost / 10 for cost in FREE]
    llm.add_request([8, 9, 10], greedy(6))
    llm.step()
    (seq,) = llm.scheduler.running
    seq.token_ids[-1] = 5  # its logits will be NaN in every step
    with pytest.warns(RuntimeWarning, match="NaN"):
        for _ in range(10):
            llm.step()
            if llm.is_finished():
                break
    assert seq.finish_reason == "error"


def test_drafts_take_what_is_left(make_llm):
    """No sequence waits for a draft or is preempted for one."""
    prompts = [random_prompt(seed, 6) for seed in range(5)]
    options = dict(num_kvcache_blocks=17, kvcache_block_size=2, max_num_batched_tokens=9)
    plain = make_llm(**options)
    expected = plain.generate(prompts, greedy(14), use_tqdm=False)
    llm = make_llm(num_speculative_tokens=8, **options)
    use_proposer(llm, Clairvoyant(expected, 0.0))
    speculator, steps = llm.scheduler.speculator, []
    assert speculator is not None
    choose = speculator.choose

    def watch_choose(seqs, proposals, budget):
        before = llm.stats
        drafts = choose(seqs, proposals, budget)
        steps.append(
            (sum(seq.num_scheduled_tokens for seq in seqs) + sum(map(len, drafts.values())), before)
        )
        return drafts

    speculator.choose = watch_choose  # type: ignore[method-assign]
    for prompt in prompts:
        llm.add_request(prompt, greedy(14))
    outputs = {}
    while not llm.is_finished():
        num_preemptions = llm.stats["num_preemptions"]
        outputs.update((output["request_id"], output) for output in llm.step())
        num_tokens, before = steps[-1]
        assert num_tokens <= 9
        assert llm.stats["num_preemptions"] == before["num_preemptions"] >= num_preemptions, (
            "all of it before the drafts"
        )
    same([outputs[i] for i in sorted(outputs)], expected)
    assert llm.stats["num_draft_tokens"] > 0 and plain.stats["num_preemptions"] > 0


# --- its parts


def test_prompt_lookup():
    token_ids = [1, 2, 3, 4, 5, 2, 3]
    proposer = PromptLookup(token_ids)
    assert proposer.propose(3) == [4, 5, 2], "what followed 2 3"
    token_ids += [9, 1, 2, 3]
    assert proposer.propose(3) == [4, 5, 2], "1 2 3 rather than 2 3, which 9 followed the last time"
    token_ids += [7, 7, 7]
    assert proposer.propose(4) == [7, 7, 7, 7], "an occurrence that overlaps the end"
    token_ids.append(8)
    assert proposer.propose(4) == [] and PromptLookup([1]).propose(4) == []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 5))
def test_prompt_lookup_as_a_search(token_ids, num_tokens):
    """The index finds what a search through the whole text finds."""
    grown: list[int] = []
    proposer = PromptLookup(grown)
    for token_id in token_ids:
        grown.append(token_id)
        proposed = proposer.propose(num_tokens)
    expected: list[int] = []
    for size in (3, 2):
        ends = [
            end
            for end in range(size, len(grown))
            if grown[end - size : end] == grown[-size:] and len(grown) > size
        ]
        if ends:
            found = grown[ends[-1] : ends[-1] + num_tokens]
            expected = (found * num_tokens)[:num_tokens]
            break
    assert proposed == expected


def make_decode(acceptance, num_tokens=8, **params):
    seq = Sequence(0, [1, 2, 3] * 3, SamplingParams(max_tokens=num_tokens, **params))
    seq.token_ids.append(1)
    seq.num_computed_tokens, seq.num_scheduled_tokens, seq.num_logits = 9, 1, 1
    seq.is_decode = True
    return seq, Proposal(PromptLookup(seq.token_ids), acceptance_rate=acceptance)


def choose(speculator, decodes, budget=100):
    seqs = [seq for seq, _ in decodes]
    drafts = speculator.choose(seqs, dict(decodes), budget)
    return [drafts.get(seq, []) for seq in seqs]


def test_drafts_that_pay():
    """The most probable draft tokens are computed while they raise tokens per second."""
    linear = [float(n) for n in range(65)]  # bound by computation
    sure, unsure = make_decode(0.9), make_decode(0.1)
    both = [sure, unsure]
    assert choose(Speculator(4, FREE, FREE), both) == [[2, 3, 1, 2], [2, 3, 1, 2]], (
        "free, so all of them"
    )
    assert choose(Speculator(4, linear, linear), both) == [[], []]
    assert sure[1].token_ids == [2, 3, 1, 2], "no draft, but a proposal, to learn from"
    by_half = [1.0 + n / 4 for n in range(65)]
    assert choose(Speculator(4, by_half, by_half), both) == [[2, 3, 1, 2], []]
    assert choose(Speculator(4, FREE, FREE), both, 3) == [[2, 3, 1], []], "the budget"
    assert choose(Speculator(4, FREE, FREE[:4]), both) == [[2], []], (
        "a step of 3 tokens is the longest with a known cost"
    )
    last = make_decode(0.9, num_tokens=3)
    assert choose(Speculator(4, FREE, FREE), [last]) == [[2]], (
        "one token is sampled, and one after the draft: that is all"
    )


@pytest.mark.parametrize(
    "params", [{"presence_penalty": 1.0}, {"repetition_penalty": 1.1}, {"min_tokens": 3}]
)
def test_who_gets_no_drafts(params):
    assert choose(Speculator(4, FREE, FREE), [make_decode(0.9, **params)]) == [[]]


def test_learning():
    proposal = Proposal(PromptLookup([1]), token_ids=[1, 2, 3, 4], position=2)
    proposal.learn([9, 9])
    assert proposal.acceptance_rate == 0.5
    proposal.learn([9, 9, 1, 2])
    assert proposal.acceptance_rate == pytest.approx(1 - 0.5 * 0.9**2), "what has been sampled"
    proposal.learn([9, 9, 7, 2, 3, 4])
    assert proposal.acceptance_rate == pytest.approx(0.9 - 0.5 * 0.9**3), (
        "what follows a rejected token is not judged"
    )
    for _ in range(100):
        proposal.learn([9, 9, 4])
    assert proposal.acceptance_rate < 0.001


def test_steps_are_measured():
    """Steps of one token and its draft per sequence are measured, and sizes between interpolated."""
    seen: list[list[int]] = []
    plain, draft, _ = measure_steps(
        lambda seqs: seen.append([seq.num_scheduled_tokens for seq in seqs]), 4, 3, 100, 64
    )
    assert len(plain) == 4 and len(draft) == 16 and plain[0] == draft[0] == 0.0
    sizes = [[1], [1, 1], [1, 1, 1], [1], [2], [4], [5, 3], [5, 5, 5], [5], [5]]
    assert seen == [size for size in sizes for _ in range(3)]


def test_long_contexts_cost_more(monkeypatch):
    """Each draft token attends to the whole context, which counts as cost."""
    clock = [0.0]
    monkeypatch.setattr(timeit, "repeat", partial(timeit.repeat, timer=lambda: clock[0]))

    def run(seqs):
        clock[0] += sum(
            seq.num_scheduled_tokens * (1.0 + 0.01 * len(seq.token_ids)) for seq in seqs
        )

    _, _, context_cost = measure_steps(run, 1, 1, 100, 64)
    assert context_cost == pytest.approx(0.01, rel=0.05)
    decode = make_decode(0.9)
    assert choose(Speculator(4, FREE, FREE, context_cost=1.0), [decode]) == [[]]
    assert choose(Speculator(4, FREE, FREE, context_cost=0.001), [decode]) == [[2, 3, 1, 2]]


def test_the_timeline_counts_drafts(make_llm, tmp_path):
    """The trace has drafts in the step that computes them, with the results that stats report."""
    prompts = [random_prompt(seed, 9) for seed in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    expected = make_llm().generate(prompts, params, use_tqdm=False)
    llm = make_llm(num_speculative_tokens=4, trace=tmp_path / "trace.json")
    use_proposer(llm, Clairvoyant(expected, 0.6))
    run, computed = llm.model_runner.executor.worker.compute, []
    llm.model_runner.executor.worker.compute = lambda batch, *reduce: (
        computed.append(len(batch.input_ids)),
        run(batch, *reduce),
    )[1]
    same(llm.generate(prompts, params, use_tqdm=False), expected)
    infos = [step.info for step in trace.read(tmp_path / "trace.json")]
    assert [info["num_tokens"] for info in infos] == computed
    for name in (
        "num_prefill_tokens",
        "num_decode_tokens",
        "num_draft_tokens",
        "num_accepted_tokens",
    ):
        assert sum(info[name] for info in infos) == llm.stats[name] > 0


# --- in 16 bits


@pytest.mark.skipif(
    cpp.reason_unavailable(torch.device("cpu"), torch.bfloat16, 16, 4) is not None,
    reason="needs a C++ compiler",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_short_query_is_so_many_decodes(dtype):
    """Results are bitwise identical, across the splits of a context."""
    torch.manual_seed(0)
    contexts, query_lens = [700, 258, 5, 90], [5, 3, 5, 1]
    kv_cache = torch.randn(2, 300, 4, 2, 32).to(dtype)
    tables = torch.randperm(300)[: 4 * 60].view(4, 60).repeat(1, 3).int().contiguous()
    query = torch.randn(sum(query_lens), 4, 32).to(dtype)
    together = cpp.attend(query, kv_cache, make_batch(query_lens, contexts, tables), 0.2)
    rows = [(seq, i) for seq, length in enumerate(query_lens) for i in range(length)]
    seen = [contexts[seq] - query_lens[seq] + 1 + i for seq, i in rows]
    alone = make_batch([1] * len(rows), seen, tables[[seq for seq, _ in rows]].contiguous())
    assert torch.equal(together, cpp.attend(query, kv_cache, alone, 0.2))


@pytest.mark.skipif(
    cpp.reason_unavailable(torch.device("cpu"), torch.bfloat16, 16, 4) is not None,
    reason="needs a C++ compiler",
)
def test_drafts_change_no_token_in_16_bits(make_llm):
    prompts = [random_prompt(seed, 9) for seed in range(6)]
    params = SamplingParams(temperature=0.7, max_tokens=60, seed=1)
    expected = make_llm(dtype="bfloat16", num_kvcache_blocks=200).generate(
        prompts, params, use_tqdm=False
    )
    llm = make_llm(dtype="bfloat16", num_kvcache_blocks=200, num_speculative_tokens=7)
    use_proposer(llm, Clairvoyant(expected, 0.8))
    same(llm.generate(prompts, params, use_tqdm=False), expected)
    assert llm.stats["num_accepted_tokens"] > 100
