"""Random engines give each request the outputs that it has alone on a plain engine.

A hand run takes new seeds for as long as one likes. Some of its engines have two ranks:

    SEED=1000 SECONDS=600 python -m pytest tests/features/test_random_engines.py -m sweep
"""

import os
import time
import warnings
from itertools import count

import pytest
from graph_helpers import replay_on_the_cpu
from random_calls import Calls
from random_engines import Case, Models

NUM_CASES = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


def run(models, directory, seed, max_ranks=1):
    case = Case(models, seed, max_ranks)
    try:
        Calls(case, directory).run()
    except BaseException:
        print(
            f"{case}\nRun it again: SEED={seed} SECONDS=0"
            " python -m pytest tests/features/test_random_engines.py -m sweep"
        )
        raise
    if case.num_ambiguous:
        message = f"seed {seed}: rounding can change {case.num_ambiguous} outputs"
        warnings.warn(message, stacklevel=2)


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_random_engine(models, tmp_path, seed):
    run(models, tmp_path, seed)


# Windows and states among them, drafts, budgets of 5 tokens, and prompt log probabilities.
@pytest.mark.parametrize("seed", [1001, 1003, 1004, 1007, 1009, 1010])
def test_random_engine_with_cuda_graphs(models, tmp_path, monkeypatch, seed):
    """A replay computes a step again, with padding, in plain layers.

    Steps overlap, except with drafts or a trace.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    replay_on_the_cpu(monkeypatch)
    case = Case(models, seed)
    case.options |= {"enable_kernels": False, "attention_backend": "auto"}
    make_llm = case.make_llm

    def make_and_overlap(**options):
        llm = make_llm(**options)
        assert llm.executor.worker.graphs is not None
        llm.overlaps = all(feature.can_overlap for feature in llm.features)
        return llm

    monkeypatch.setattr(case, "make_llm", make_and_overlap)
    Calls(case, tmp_path).run()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2000, 2008))
def test_random_engine_on_a_gpu(models, tmp_path, seed):
    """With CUDA graphs. Steps overlap, except with drafts or a trace."""
    case = Case(models, seed)
    case.model = ["qwen3", "gemma3", "mistral-window", "smollm3"][seed % 4]
    case.options |= {"enable_kernels": True, "attention_backend": "auto"}
    case.options |= {"kvcache_block_size": 16, "num_kvcache_blocks": 4 + seed % 5}
    if seed < 2004:
        case.options["num_speculative_tokens"] = 0
    calls = Calls(case, tmp_path)
    assert calls.llm.executor.worker.graphs is not None
    calls.run()


@pytest.mark.sweep
def test_random_engines_for_a_while(models, tmp_path):
    end = time.monotonic() + float(os.environ.get("SECONDS", 60))
    for seed in count(int(os.environ.get("SEED", NUM_CASES))):
        run(models, tmp_path, seed, max_ranks=2)
        if time.monotonic() > end:
            break
