"""What only a GPU can show. The kernels' grids and the graphs are in test_attention, test_kernels and test_cuda_graphs, which
use a GPU where there is one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    Oracle,
    check_invariants,
    greedy,
    make_batch,
    make_checkpoint,
    random_prompt,
)

from nanovllm import DEMO_MODEL, LLM, SamplingParams

pytestmark = pytest.mark.gpu
MakeLLM = Callable[..., LLM]
GREEDY = greedy(40)
POOL = {"num_kvcache_blocks": 64, "kvcache_block_size": 16}
PROMPTS = [random_prompt(i, 1 + 7 * i) for i in range(8)]
SAMPLED = [
    SamplingParams(seed=1, max_tokens=20),
    SamplingParams(seed=2, top_p=0.8, max_tokens=20),
    SamplingParams(seed=3, top_k=5, min_p=0.02, temperature=1.5, max_tokens=20),
    SamplingParams(
        seed=4, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3, max_tokens=20
    ),
    SamplingParams(seed=5, logprobs=3, max_tokens=20),
    SamplingParams(seed=6, min_tokens=10, stop_token_ids=list(range(50)), max_tokens=20),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=20),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=20),
]


def generate(
    llm: LLM,
    prompts: list[list[int]] = PROMPTS,
    params: SamplingParams | list[SamplingParams] = GREEDY,
) -> list:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


# --- the same tokens


def test_auto_takes_the_kernels(make_llm: MakeLLM, tiny: tuple[str, Oracle]) -> None:
    llm = make_llm(**POOL)
    assert (
        llm.model_runner.executor.worker.backend.NAME in ("triton", "flash_attn")
        and llm.model_runner.executor.worker.graphs
    )
    assert generate(llm) == [tiny[1](prompt, 40) for prompt in PROMPTS]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("chunked", [True, False], ids=["mixed", "prefill first"])
def test_tokens(
    make_llm: MakeLLM, tiny: tuple[str, Oracle], chunked: bool, enforce_eager: bool
) -> None:
    """Cold and warm, in a pool that is too small: preempted, found in the cache, in batches that grow and shrink."""
    llm = make_llm(
        kvcache_block_size=16, num_kvcache_blocks=8, max_model_len=64, max_num_batched_tokens=40, max_num_seqs=11,
        enable_chunked_prefill=chunked, enforce_eager=enforce_eager,
    )  # fmt: skip
    prompts = [random_prompt(i, length) for i, length in enumerate((1, 15, 16, 17, 33))] * 2
    for _ in range(2):
        assert generate(llm, prompts, SamplingParams(temperature=0.0, max_tokens=8)) == [
            tiny[1](prompt, 8) for prompt in prompts
        ]
        check_invariants(llm)
    assert llm.stats["num_cached_tokens"] and llm.stats["num_preemptions"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """With all optimized layers, and the backend that auto takes: as far from float32 as transformers' own on the CPU, give or take half."""
    reference = make_checkpoint(tmp_path, dtype=dtype)
    llm = LLM(str(tmp_path), num_kvcache_blocks=64)
    model, seen = llm.model_runner.executor.worker.model, []
    compute_logits = model.compute_logits
    monkeypatch.setattr(
        model, "compute_logits", lambda hidden: seen.append(compute_logits(hidden)) or seen[-1]
    )
    prompt = random_prompt(3, 40)
    generate(
        llm,
        [prompt[:length] for length in range(1, 41)],
        SamplingParams(temperature=0.0, max_tokens=1),
    )
    ours = torch.cat(seen).float().cpu()
    with torch.inference_mode():
        theirs = reference(torch.tensor([prompt])).logits[0].float()
        exact = reference.float()(torch.tensor([prompt])).logits[0]
    assert ours.shape == (40, VOCAB_SIZE)
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm() + 1e-5 * exact.norm()


def test_seeds_draw_the_same_on_either_device(make_llm: MakeLLM) -> None:
    tokens, logprobs = [], []
    for device in ("cpu", "cuda"):
        outputs = make_llm(device=device, **POOL).generate(PROMPTS, SAMPLED, use_tqdm=False)
        tokens.append([output["token_ids"] for output in outputs])
        logprobs.append(
            torch.tensor([output["cumulative_logprob"] for output in outputs if output["logprobs"]])
        )
    assert tokens[0] == tokens[1]
    torch.testing.assert_close(logprobs[0], logprobs[1], atol=1e-3, rtol=1e-4)


def test_the_callers_settings_change_nothing(make_llm: MakeLLM) -> None:
    expected = generate(make_llm(**POOL), params=SAMPLED)
    with torch.device("meta"), torch.autocast("cuda", dtype=torch.float16), torch.enable_grad():
        torch.set_float32_matmul_precision("medium")
        try:
            assert generate(make_llm(**POOL), params=SAMPLED) == expected
        finally:
            torch.set_float32_matmul_precision("highest")


# --- several devices, several engines


def test_the_last_gpu(make_llm: MakeLLM, tiny: tuple[str, Oracle]) -> None:
    """And one on the first beside it, which was there before: each computes, and records its graphs, on its own."""
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    llms = [make_llm(device=name, **POOL) for name in ("cuda:0", str(last))]
    for llm in (*llms, *llms):
        assert generate(llm) == [tiny[1](prompt, 40) for prompt in PROMPTS]
    executor = llms[1].model_runner.executor.worker
    held = [*executor.model.parameters(), *executor.kv_caches, executor.graphs.buffer]
    held += [hidden for _, hidden in executor.graphs.graphs.values()]
    assert {tensor.device for tensor in held} == {last} and torch.cuda.current_device() == 0
    with torch.cuda.device(last):
        assert generate(llms[0], params=SAMPLED) == generate(llms[1], params=SAMPLED)
        assert torch.cuda.current_device() == last.index


def test_two_engines(make_llm: MakeLLM, tiny: tuple[str, Oracle]) -> None:
    """In turns, step by step; the end of one is not that of the other."""
    one, two = make_llm(**POOL), make_llm(**POOL, enforce_eager=True)
    expected = [tiny[1](prompt, 40) for prompt in PROMPTS]
    outputs: dict[LLM, dict[int, list[int]]] = {one: {}, two: {}}  # by request
    for llm in outputs:
        for prompt in PROMPTS:
            llm.add_request(prompt, GREEDY)
    while not (one.is_finished() and two.is_finished()):
        for llm in outputs:
            outputs[llm].update(
                (output["request_id"], output["token_ids"]) for output in llm.step()
            )
    assert outputs[one] == outputs[two] == dict(enumerate(expected))
    one.exit()
    assert generate(two) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks(tiny: tuple[str, Oracle]) -> None:
    with LLM(tiny[0], tensor_parallel_size=2, **POOL) as llm:
        assert generate(llm) == [tiny[1](prompt, 40) for prompt in PROMPTS]


# --- a step


def test_a_batch_crosses_whole() -> None:
    batch = make_batch([4, 3], [9, 3], torch.randint(99, (2, 5), dtype=torch.int32))
    for name in ("input_ids", "positions", "slot_mapping"):
        getattr(batch, name)[:] = torch.randint(1000, (7,))
    moved = batch.to(torch.device("cuda"))
    for name, value in vars(batch).items():
        other = getattr(moved, name)
        if isinstance(value, torch.Tensor):
            assert other.is_cuda and torch.equal(other.cpu(), value)
        else:
            assert other == value


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_the_host_waits_once_a_step(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    """For the tokens, and once more for each of the four columns of log probabilities: torch refuses every other time."""
    llm = make_llm(**POOL, enforce_eager=enforce_eager)
    runner, waits, tolist = llm.model_runner, [], torch.Tensor.tolist

    def read(tensor: torch.Tensor) -> list:
        waits[-1] += tensor.is_cuda
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        numbers = tolist(tensor)
        torch.cuda.set_sync_debug_mode(mode)
        return numbers

    run, sample = runner.run, runner.sample
    for params, num_waits in (
        (SAMPLED[0], 1),
        (SAMPLED[2], 1),
        (GREEDY, 1),
        (SAMPLED[3], 1),
        (SAMPLED[4], 5),
    ):
        for prompt in PROMPTS:
            llm.add_request(prompt, params)
        while not llm.is_finished():
            waits.append(0)
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", read)
                for name, call in (("run", run), ("sample", sample)):
                    patch.setattr(
                        runner, name, lambda *args, call=call: without_waiting(call, *args)
                    )
                llm.step()
        assert set(waits) == {num_waits}
        waits.clear()


def without_waiting(function: Callable, *args: object) -> object:
    torch.cuda.set_sync_debug_mode("error")
    try:
        return function(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"num_kvcache_blocks": 2000}], ids=["profiled", "given"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_nothing_is_compiled_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool, options: dict
) -> None:
    import triton

    make_checkpoint(tmp_path, dtype=torch.bfloat16, vocab_size=128)
    llm = LLM(str(tmp_path), gpu_memory_utilization=0.2, enforce_eager=enforce_eager, **options)
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **details: compiled.append(details)
    )
    for num_seqs, length in ((1, 1), (3, 17), (33, 100), (2, 200)):
        prompts = [random_prompt(i, length) for i in range(num_seqs)]
        for params in (
            {"temperature": 0.0},
            {},
            {"top_p": 0.9},
            {"top_k": 3, "presence_penalty": 1.0, "logprobs": 2},
        ):
            generate(llm, prompts, SamplingParams(max_tokens=20, **params))
    assert not compiled


# --- memory


def count_reserved() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_memory_stays_within_its_share(tmp_path: Path, enforce_eager: bool) -> None:
    """Also in the largest steps, and with somebody else on the GPU. Of 32 KB a token, the KV cache takes all there is."""
    shape = dict(
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
    )
    make_checkpoint(tmp_path, dtype=torch.bfloat16, vocab_size=50_000, **shape)
    other = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    llm = LLM(
        str(tmp_path), gpu_memory_utilization=0.2, max_model_len=8192, enforce_eager=enforce_eager
    )
    costly = dict(top_p=0.9, repetition_penalty=1.1, logprobs=5, min_tokens=5, stop_token_ids=[7])
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, **costly)
    generate(llm, [random_prompt(i, 200) for i in range(300)], params)
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert 0.15 * total < taken < 0.2 * total + (256 << 20)
    del other


def test_no_more_blocks_than_sequences_can_use() -> None:
    llm = LLM(DEMO_MODEL, max_num_seqs=8, max_model_len=100, kvcache_block_size=16)
    assert llm.stats["num_blocks"] == 8 * 7 and not len(llm.model_runner.penalties.counts)


def test_exit_gives_the_memory_back(make_llm: MakeLLM) -> None:
    generate(
        make_llm(**POOL), params=SAMPLED
    )  # what stays with the process: the workspaces of cuBLAS
    before = count_reserved()
    llm = make_llm(num_kvcache_blocks=100_000, kvcache_block_size=16)  # of 8 KB
    generate(llm, params=SAMPLED)
    assert count_reserved() > before + 700_000_000
    llm.exit()
    assert torch.cuda.memory_reserved() < before + 100_000_000
