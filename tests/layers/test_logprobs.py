"""Log probabilities are the model's own, and NaN logits end one request only."""

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

from nanovllm import LLM, SamplingParams
from nanovllm.layers.logprobs import find_logprobs, read_logprobs


@torch.inference_mode()
@pytest.mark.parametrize("options", [{}, {"num_kvcache_blocks": 5}])
def test_logprobs_are_from_before_penalties_and_filters(tiny, make_llm, options):
    prompts = [random_prompt(i, 6) for i in range(4)]
    params = [
        SamplingParams(seed=1, logprobs=3, max_tokens=8),
        SamplingParams(temperature=0.0, logprobs=0, max_tokens=8),
        SamplingParams(seed=2, max_tokens=8),
        SamplingParams(seed=3, logprobs=1000, repetition_penalty=1.5, top_k=4, max_tokens=8),
    ]
    outputs = make_llm(**options).generate(prompts, params)
    not_requested = outputs.pop(2)
    assert not_requested["logprobs"] is None
    assert not_requested["cumulative_logprob"] is None
    for output, num_top in zip(outputs, (3, 0, VOCAB_SIZE)):
        prompt, token_ids = output["prompt_token_ids"], output["token_ids"]
        reference = tiny[1].find_logprobs(prompt + token_ids)[len(prompt) - 1 :]
        assert len(output["logprobs"]) == len(token_ids) == 8
        for row, token_id, entry in zip(reference, token_ids, output["logprobs"]):
            top = row.topk(num_top).indices.tolist()
            assert list(entry) == list(dict.fromkeys([*top, token_id]))
            assert list(entry.values()) == pytest.approx(row[list(entry)].tolist(), abs=1e-4)
        total = reference.gather(1, torch.tensor(token_ids)[:, None]).sum()
        assert output["cumulative_logprob"] == pytest.approx(total.item(), abs=1e-3)


def test_logprobs_in_a_stream_are_those_so_far(make_llm):
    llm = make_llm()
    outputs = list(llm.stream([1, 2, 3], SamplingParams(logprobs=1, max_tokens=4)))
    assert [len(output["logprobs"]) for output in outputs] == [1, 2, 3, 4]
    llm.abort(llm.add_request([1], SamplingParams(logprobs=1)))
    (aborted,) = llm.step()
    assert aborted["logprobs"] == []
    assert aborted["cumulative_logprob"] == 0


# Logits that are NaN


NAN_TOKEN = VOCAB_SIZE - 1


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A checkpoint whose logits are NaN after NAN_TOKEN, and its oracle."""

    def poison(weights):
        weights["model.embed_tokens.weight"][NAN_TOKEN].fill_(torch.nan)

    directory = tmp_path_factory.mktemp("poisoned")
    oracle = Oracle(make_checkpoint(directory, tie_word_embeddings=False))
    edit_weights(directory, poison)
    return str(directory), oracle


@pytest.mark.parametrize(
    "dtype, params",
    [
        ("float32", {"temperature": 0.0}),
        ("bfloat16", {}),
        ("float32", {"top_p": 0.9}),
        ("bfloat16", {"logprobs": 2, "repetition_penalty": 1.2}),
    ],
)
def test_nan_logits_end_one_request(poisoned, dtype, params):
    """The others go on, also one that shares blocks with it."""
    llm = LLM(poisoned[0], dtype=dtype, num_kvcache_blocks=64, kvcache_block_size=4)
    short = random_prompt(0, 5)
    shared = short * 2
    # With the block of `short` in the cache, request 1 computes 8 tokens. In longer chunks, masked
    # NaN values spread to all tokens.
    prompts = [short, [*shared, NAN_TOKEN, 3], random_prompt(1, 6), [NAN_TOKEN], shared]
    # Healthy requests can sample NAN_TOKEN, which ends them here.
    params = SamplingParams(max_tokens=6, seed=1, stop_token_ids=[NAN_TOKEN], **params)
    with pytest.warns(RuntimeWarning, match="request [13] ends with an error: its logits are NaN"):
        outputs = llm.generate(prompts, params)
    for index, output in enumerate(outputs):
        assert (output["finish_reason"] == "error") == (index in (1, 3))
        if output["finish_reason"] == "error":
            assert output["token_ids"] == []
            assert not output["logprobs"]
        elif params.temperature == 0.0:
            token_ids = output["token_ids"]
            assert token_ids == poisoned[1](prompts[index], len(token_ids))
    check_invariants(llm)


def test_beams_end_if_their_logits_are_nan(poisoned):
    llm = LLM(poisoned[0], num_kvcache_blocks=64)
    with pytest.warns(RuntimeWarning, match="NaN"):
        failed, found = llm.beam_search([[NAN_TOKEN], [3, 4]], 2, 1)
    assert [(beam["finish_reason"], beam["token_ids"]) for beam in failed] == [("error", [])]
    assert "logits are NaN" in failed[0]["error"]
    assert [beam["finish_reason"] for beam in found] == ["length"] * 2


def test_token_0_has_its_log_probability():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    found = find_logprobs(logits, torch.tensor([0]), [1])
    assert read_logprobs(found, [1]) == [{0: pytest.approx(logits.log_softmax(-1)[0, 0].item())}]


def test_log_probabilities_are_computed_in_float32():
    logits = torch.arange(8.0)[None]
    _, _, numbers = find_logprobs(logits.bfloat16(), torch.tensor([1]), [0])
    assert numbers.tolist() == [[logits.log_softmax(-1)[0, 1].item()]]


def test_an_improbable_token_has_its_log_probability():
    """Its probability is 0 in float32."""
    _, _, numbers = find_logprobs(torch.tensor([[0.0, -200.0]]), torch.tensor([1]), [0])
    assert numbers.tolist() == [[-200.0]]


def test_rows_have_as_many_entries_as_they_ask_for():
    """Row 1 asks for nothing, and the token of row 2 is among its most probable ones."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(3, 1)
    requested = [1, None, 2]
    found = find_logprobs(logits, torch.tensor([2, 3, 1]), requested)
    assert [list(entry) for entry in read_logprobs(found, requested)] == [[0, 2], [], [0, 1]]
