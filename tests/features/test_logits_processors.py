"""Functions of a request change its logits, and those of no other request."""

import pytest
import torch
from conftest import check_idle, generate_ids, greedy, list_ways, make_drafts_free, random_prompt

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams

PROMPTS = [random_prompt(seed, 20) for seed in range(4)]


def ban(*token_ids):
    def process(tokens, logits):
        logits[list(token_ids)] = -torch.inf  # in place, of a copy
        return logits

    return process


def prefer_sum(tokens, logits):
    """Depends on all tokens so far."""
    preferred = (sum(tokens) + len(tokens)) % len(logits)
    return logits + 5.0 * torch.nn.functional.one_hot(torch.tensor(preferred), len(logits))


@pytest.mark.parametrize("way", list_ways(), ids=str)
def test_a_function_sees_the_tokens_so_far(tiny, way):
    """In batches, chunks and a small pool, with drafts, whose tokens it sees as well."""
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=12, logits_processors=[prefer_sum, ban(3)])
        for t in (0.0, 0.8)
    ]
    with LLM(tiny[0], max_model_len=100, enable_kernels=False) as llm:
        expected = [generate_ids(llm, [prompt], each) for each in params for prompt in PROMPTS]
        plain = generate_ids(llm, [PROMPTS[0]], greedy(12))
    assert plain != expected[0]
    options = {"max_num_batched_tokens": 9, "num_kvcache_blocks": 20, "kvcache_block_size": 4}
    for num_drafts in (0, 3):
        with LLM(
            tiny[0], max_model_len=80, num_speculative_tokens=num_drafts, **options, **way
        ) as llm:
            if num_drafts:
                make_drafts_free(llm)
            found = []
            for each in params:
                found += [[ids] for ids in generate_ids(llm, PROMPTS, each)]
            assert found == expected
            assert llm.stats["num_preemptions"] > 0
            check_idle(llm)


def test_it_is_what_a_bias_is(tiny):
    def add(tokens, logits):
        logits[7] += 3.0
        return logits

    with LLM(tiny[0], max_model_len=100, enable_prefix_caching=False) as llm:
        outputs = [
            llm.generate(PROMPTS[0], SamplingParams(seed=1, logprobs=2, max_tokens=9, **changes))[0]
            for changes in ({"logits_processors": [add]}, {"logit_bias": {7: 3.0}})
        ]
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]
    assert outputs[0]["logprobs"] == outputs[1]["logprobs"]  # the model's own


def return_float64(tokens, logits):
    return logits.double()


def return_a_part(tokens, logits):
    return logits[1:]


def return_nothing(tokens, logits):
    logits[0] = 0.0


def fail_late(tokens, logits):
    if len(tokens) == 23:
        raise KeyError("no such token")
    return logits


@pytest.mark.parametrize(
    "function, message, num_tokens",
    [
        (return_float64, "torch.float64, not of torch.float32", 0),
        (return_a_part, "not logits of shape", 0),
        (return_nothing, "returned NoneType", 0),
        (fail_late, "KeyError\\('no such token'\\)", 3),
        (lambda tokens, logits: logits * torch.nan, "NaN", 0),
    ],
)
def test_a_failure_ends_its_request_and_no_other(tiny, function, message, num_tokens):
    with LLM(tiny[0], max_model_len=100) as llm:
        expected = generate_ids(llm, PROMPTS[1:], greedy(8))
        params = [SamplingParams(temperature=0.0, max_tokens=8, logits_processors=[function])]
        with pytest.warns(RuntimeWarning, match=message) as caught:
            outputs = llm.generate(PROMPTS, params + [greedy(8)] * 3)
        assert outputs[0]["finish_reason"] == "error"
        assert len(outputs[0]["token_ids"]) == num_tokens
        assert [output["token_ids"] for output in outputs[1:]] == expected
        (warning,) = caught
        if "NaN" not in message:
            assert isinstance(warning.message.__cause__, (KeyError, ValueError))
        assert generate_ids(llm, PROMPTS[1:], greedy(8)) == expected
        check_idle(llm)


def test_a_constraint_holds_whatever_a_function_does(demo):
    pytest.importorskip("llguidance")
    outputs = StructuredOutputsParams(regex="(yes|no), [0-9]{2}")

    def reject_all_but_one(tokens, logits):
        return torch.full_like(logits, -50.0)

    params = SamplingParams(structured_outputs=outputs, logits_processors=[reject_all_but_one])
    (output,) = demo.generate("Is it?", params)
    assert output["text"][:3] in ("yes", "no,")
    assert output["finish_reason"] == "stop"


def test_a_function_that_leaves_nothing_of_a_constraint_is_an_error(demo):
    """Otherwise token 0 would be sampled, which ends a text here."""

    def allow_one(tokens, logits):
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([7]), 0.0)

    params = SamplingParams(
        logits_processors=[allow_one], structured_outputs={"choice": ["abc"]}, seed=1
    )
    with pytest.warns(RuntimeWarning, match="NaN"):
        (output,) = demo.generate("Once", params)
    assert (output["finish_reason"], output["token_ids"]) == ("error", [])


def test_functions_are_checked(tiny):
    for value in (3, [3], "f", {"f": ban(1)}):
        with pytest.raises((TypeError, ValueError), match="logits_processors"):
            SamplingParams(logits_processors=value)
    with LLM(tiny[0], max_model_len=100) as llm:
        (feature,) = [each for each in llm.features if each.serves == "logits_processors"]
        feature.num_ranks = 2
        with pytest.raises(ValueError, match="tensor_parallel_size > 1"):
            llm.generate(PROMPTS[0], SamplingParams(logits_processors=[ban(1)]))
