"""Penalties match their definition and cost nothing where no request asks for them."""

import pytest
import torch
from conftest import generate_ids, random_prompt

from nanovllm import SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.penalties import apply_penalties

KINDS = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.7, "presence_penalty": 0.5},
    {"presence_penalty": -0.5, "frequency_penalty": 1.2, "repetition_penalty": 1.3},
]


def penalized_greedy(model, prompt, params):
    """The definition of the penalties, one token and one vocabulary entry at a time."""
    generated = []
    for _ in range(params.max_tokens):
        token_ids = prompt + generated
        logits = model(torch.tensor([token_ids])).logits[0, -1].tolist()
        for token_id in set(token_ids):
            if logits[token_id] > 0:
                logits[token_id] /= params.repetition_penalty
            else:
                logits[token_id] *= params.repetition_penalty
        for token_id in set(generated):
            logits[token_id] -= params.frequency_penalty * generated.count(token_id)
            logits[token_id] -= params.presence_penalty
        generated.append(logits.index(max(logits)))
    return generated


@torch.inference_mode()
def test_penalties_match_their_definition(tiny, make_llm):
    """Neither preemption, chunks, cache hits nor a lane's earlier sequence changes a token."""
    prompts = [random_prompt(i, 5 + i) for i in range(len(KINDS))]
    params = [SamplingParams(temperature=0.0, max_tokens=14, **kind) for kind in KINDS]
    model = tiny[1].model
    expected = [penalized_greedy(model, prompt, p) for prompt, p in zip(prompts, params)]
    for options in ({"num_kvcache_blocks": 7}, {"max_num_seqs": 2, "max_num_batched_tokens": 3}):
        llm = make_llm(**options)
        for _ in range(2):
            assert generate_ids(llm, prompts, params) == expected
        if "num_kvcache_blocks" in options:
            assert llm.stats["num_preemptions"] > 0


def test_bounds_of_the_repetition_penalty_keep_logits_finite():
    """SamplingParams promises this for logits up to 1e32."""
    for bound in (1e-6, 1e6):
        seq = Sequence(0, [0, 1], SamplingParams(repetition_penalty=bound))
        logits = apply_penalties(torch.tensor([[1e32, -1e32]]), [seq])
        torch.testing.assert_close(logits, torch.tensor([[1e32 / bound, -1e32 * bound]]))


def test_a_batch_without_penalties_and_logprobs_does_no_work_for_them(make_llm, monkeypatch):
    llm = make_llm()
    monkeypatch.setattr("nanovllm.engine.model_runner.apply_penalties", None)
    monkeypatch.setattr("nanovllm.layers.logprobs.to_device", None)
    generate_ids(llm, [[1, 2]] * 3, SamplingParams(top_p=0.9, n=2))


def test_rows_of_a_batch_have_their_own_penalties_biases_and_bans():
    """Rows of different lengths, with logits of both signs below 1. Token 0 is in none of them."""
    rows = [
        ([1, 2], {"repetition_penalty": 2.0}),
        ([3, 3, 4, 5], {"repetition_penalty": 0.5, "presence_penalty": 1.0}),
        ([6, 7], {"logit_bias": {6: 1.5, 0: -2.0}}),
        ([6, 7], {"min_tokens": 1}),
        ([6, 7], {"min_tokens": 2}),
        ([6, 7], {}),
    ]
    seqs = []
    for token_ids, settings in rows:
        seq = Sequence(0, token_ids[:1], SamplingParams(**settings))
        seq.stop_token_ids = frozenset([2])
        seq.token_ids += token_ids[1:]
        seqs.append(seq)
    logits = torch.tensor([[-0.4, -0.3, 0.2, 0.1, 0.5, -0.6, 0.7, 0.8]]).repeat(len(rows), 1)
    expected = logits.clone()
    expected[0, [1, 2]] = torch.tensor([-0.6, 0.1])
    expected[1, [3, 4, 5]] = torch.tensor([0.2 - 1.0, 1.0 - 1.0, -0.3 - 1.0])
    expected[2, [6, 0]] = torch.tensor([2.2, -2.4])
    expected[4, 2] = -torch.inf
    torch.testing.assert_close(apply_penalties(logits, seqs), expected)
    logits = expected.new_ones(2, 8)
    torch.testing.assert_close(
        apply_penalties(logits, [make_row([1, 2, 3], 2.0), make_row([0], 2.0)]),
        torch.tensor([[1, 0.5, 0.5, 0.5, 1, 1, 1, 1], [0.5, 1, 1, 1, 1, 1, 1, 1]]),
    )


def make_row(token_ids, repetition_penalty=1.0, **settings):
    params = SamplingParams(repetition_penalty=repetition_penalty, **settings)
    return Sequence(0, token_ids, params, stop_token_ids=frozenset([2]))


def test_the_given_logits_stay():
    """Log probabilities are computed from them later."""
    rows = [make_row([1], 2.0), make_row([1], logit_bias={3: 2.0}), make_row([1], min_tokens=1)]
    for row in rows:
        logits = torch.ones(1, 4)
        changed = apply_penalties(logits, [row])
        assert not torch.equal(changed, logits)
        assert torch.equal(logits, torch.ones(1, 4))


def test_penalties_and_biases_are_computed_in_float32():
    for row, expected in (
        (make_row([3], logit_bias={3: 0.05}), 16.05),
        (make_row([3], 1.1), 16 / 1.1),
    ):
        changed = apply_penalties(torch.full((1, 4), 16.0).bfloat16(), [row])
        assert changed[0, 3].item() == pytest.approx(expected, abs=1e-5)


def test_a_ban_holds_for_any_logit():
    changed = apply_penalties(torch.tensor([[0.0, 1.0, torch.inf]]), [make_row([1], min_tokens=1)])
    assert changed.tolist() == [[0.0, 1.0, -torch.inf]]


def test_a_ban_can_be_lifted():
    """A grammar lifts it if only stop tokens may come."""
    row = make_row([1], min_tokens=3)
    row.min_num_tokens = 0
    assert apply_penalties(torch.ones(1, 4), [row]).tolist() == [[1.0] * 4]


def test_padding_of_a_short_row_does_not_count():
    long = make_row([5], frequency_penalty=1.0)
    long.token_ids += [6] * 4
    for settings in ({"frequency_penalty": 1.0}, {"presence_penalty": 1.0}):
        changed = apply_penalties(torch.zeros(2, 8), [make_row([3, 4], **settings), long])
        assert changed.tolist() == [[0.0] * 8, [0.0] * 6 + [-4.0, 0.0]]


def test_all_rows_of_a_draft_have_their_biases_and_bans():
    """They belong to one sequence."""
    row = make_row([1], logit_bias={3: 1.0}, min_tokens=3)
    changed = apply_penalties(torch.zeros(2, 4), [row, row])
    assert changed.tolist() == [[0.0, 0.0, -torch.inf, 1.0]] * 2
