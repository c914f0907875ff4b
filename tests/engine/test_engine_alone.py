"""LLMEngine alone, without the optional features of LLM.

It serves what it accepts as LLM does, and rejects all else by name.
"""

import pytest
from conftest import greedy, random_prompt
from families import make_family

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import POLICIES

POOL = {"num_kvcache_blocks": 24, "kvcache_block_size": 4, "max_num_batched_tokens": 60}
NEEDS_LLM = "no feature .* use nanovllm.LLM"


def run(engine: LLMEngine, prompts, params):
    """The final outputs, and the number of steps."""
    ids = [engine.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    outputs = {}
    num_steps = 0
    while not engine.is_finished():
        outputs.update({output["request_id"]: output for output in engine.step()})
        num_steps += 1
    return [outputs[request_id] for request_id in ids], num_steps


@pytest.mark.parametrize("is_mixed", [True, False])
def test_what_it_accepts_it_serves_as_llm_does(tiny, is_mixed):
    settings = [
        {"temperature": 0.0},
        {"seed": 1, "top_k": 9, "min_p": 0.01},
        {"seed": 2, "repetition_penalty": 1.4, "logprobs": 2},
        {"seed": 3, "logit_bias": {5: 8.0}, "min_tokens": 6, "stop_token_ids": [5]},
    ]
    prompts = [random_prompt(index, 30) for index in range(len(settings))]
    params = [SamplingParams(max_tokens=12, **each) for each in settings]
    config = Config(tiny[0], enable_chunked_prefill=is_mixed, **POOL)
    engine = LLMEngine(config)
    assert type(engine.scheduler) is POLICIES["mixed" if is_mixed else "prefill_first"]
    found = run(engine, prompts, params)
    with LLM(tiny[0], enable_chunked_prefill=is_mixed, **POOL) as llm:
        assert found == run(llm, prompts, params)
        assert llm.stats["num_preemptions"]


def test_a_policy_is_chosen_by_its_name_or_by_chunked_prefill(tiny):
    for options in ({"enable_chunked_prefill": False}, {"policy": "prefill_first"}):
        assert Config(tiny[0], **options).policy == "prefill_first"
    with pytest.raises(ValueError, match="policy must be one of 'mixed', 'prefill_first'"):
        LLMEngine(Config(tiny[0], policy="unknown"))


def test_options_and_parameters_that_it_lacks_are_rejected(tiny):
    engine = LLMEngine(Config(tiny[0], **POOL))
    for name, value in {"num_speculative_tokens": 2, "trace": "trace.json"}.items():
        with pytest.raises(ValueError, match=f"{name} {NEEDS_LLM}"):
            LLMEngine(Config(tiny[0], **{name: value}))
    for name, value in {"prompt_logprobs": 1, "structured_outputs": {"regex": "a"}}.items():
        with pytest.raises(ValueError, match=f"{name} {NEEDS_LLM}"):
            engine.add_request([1, 2, 3], SamplingParams(**{name: value}))
    assert engine.is_finished()


@pytest.mark.parametrize(
    "family, name", [("qwen3.5", "recurrent states"), ("gemma3", "sliding windows")]
)
def test_models_that_need_a_feature_are_rejected(tmp_path, family, name):
    make_family(tmp_path, family)
    with pytest.raises(ValueError, match=f"{name} {NEEDS_LLM}"):
        LLMEngine(Config(str(tmp_path), **POOL))
    with LLM(str(tmp_path), **POOL) as llm:
        assert llm.generate([1, 2], greedy(2))
