"""What only a GPU can show. The kernels' grids and the graphs are in test_attention, test_kernels and test_cuda_graphs, which
use a GPU where there is one."""

from collections.abc import Callable

import pytest
import torch
from conftest import Oracle, make_checkpoint, random_prompt

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def test_auto_takes_the_kernels(make_llm: Callable[..., LLM], tiny: tuple[str, Oracle]) -> None:
    llm = make_llm(kvcache_block_size=16)
    assert llm.model_runner.executor.backend.NAME in ("triton", "flash_attn") and llm.model_runner.executor.graphs
    prompts = [random_prompt(i, 1 + 7 * i) for i in range(8)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 40) for prompt in prompts]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_memory_stays_within_its_share(tiny: tuple[str, Oracle], enforce_eager: bool) -> None:
    """Also in the largest steps, and with somebody else on the GPU."""
    other = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    llm = LLM(tiny[0], gpu_memory_utilization=0.2, enforce_eager=enforce_eager)
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=30, ignore_eos=True)
    llm.generate([random_prompt(i, 200) for i in range(300)], params, use_tqdm=False)
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert 0.15 * total < taken < 0.21 * total
    del other


def test_nothing_is_compiled_while_serving(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    directory = tmp_path_factory.mktemp("bfloat16")
    make_checkpoint(directory, dtype=torch.bfloat16, vocab_size=128)
    llm = LLM(str(directory), gpu_memory_utilization=0.2)
    llm.generate(random_prompt(0, 20), SamplingParams(temperature=0.5, max_tokens=4), use_tqdm=False)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **details: compiled.append(details))
    for num_seqs, length in ((1, 1), (3, 17), (33, 100), (2, 200)):
        prompts = [random_prompt(i, length) for i in range(num_seqs)]
        for temperature in (0.0, 1.0):
            llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=20), use_tqdm=False)
    assert not compiled
