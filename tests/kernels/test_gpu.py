"""The engine on a GPU: its tokens and its memory.

Attention, layers, CUDA graphs and host synchronizations have tests of their own, which use a GPU
where there is one.
"""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
from conftest import (
    DEVICE,
    VOCAB_SIZE,
    check_invariants,
    generate_ids,
    greedy,
    make_checkpoint,
    random_prompt,
)
from kernel_helpers import (
    make_delta_rule,
    make_delta_step,
    optimize,
    quantize,
    randomize,
)

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.self_tests import list_tensors
from nanovllm.layers.linear import ColumnParallelLinear
from nanovllm.layers.quantized import INT4, INT8
from nanovllm.models.moe import Experts

pytestmark = pytest.mark.gpu
graphs_and_eager = pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
BF16 = torch.bfloat16
GREEDY = greedy(40)
POOL = {"num_kvcache_blocks": 64, "kvcache_block_size": 16}
PROMPTS = [random_prompt(i, 1 + 7 * i) for i in range(8)]
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
SAMPLED = [
    SamplingParams(seed=1, max_tokens=20),
    SamplingParams(seed=2, max_tokens=20, top_p=0.8),
    SamplingParams(seed=3, max_tokens=20, top_k=5, min_p=0.02, temperature=1.5),
    SamplingParams(seed=4, max_tokens=20, min_tokens=10, stop_token_ids=[*range(50)], **PENALTIES),
    SamplingParams(seed=5, max_tokens=20, logprobs=3),
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, repetition_penalty=1.2),
] + [SamplingParams(seed=6, max_tokens=20)] * 2


@pytest.fixture
def expected(tiny):
    """The tokens that transformers generates for PROMPTS."""
    return [tiny[1](prompt, 40) for prompt in PROMPTS]


@graphs_and_eager
@pytest.mark.parametrize(
    "options",
    [{}, {"enable_chunked_prefill": False}, {"model_impl": "transformers"}],
    ids=["mixed", "prefill first", "any decoder"],
)
def test_engine_matches_transformers(make_llm, tiny, options, enforce_eager):
    """Twice in a pool that is too small, so with preemptions and prefix hits."""
    llm = make_llm(
        kvcache_block_size=16, num_kvcache_blocks=8, max_model_len=64, max_num_batched_tokens=40,
        max_num_seqs=11, enforce_eager=enforce_eager, **options,
    )  # fmt: skip
    worker = llm.executor.worker
    assert worker.backend.NAME == "triton"
    assert (worker.graphs is None) == enforce_eager
    prompts = [random_prompt(i, length) for i, length in enumerate((1, 15, 16, 17, 33))] * 2
    for _ in range(2):
        assert generate_ids(llm, prompts, greedy(8)) == [tiny[1](prompt, 8) for prompt in prompts]
        check_invariants(llm)
    assert llm.stats["num_cached_tokens"]
    assert llm.stats["num_preemptions"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_logits_are_as_exact_as_those_of_transformers(tmp_path, monkeypatch, dtype):
    """With the backend that "auto" selects. The error is at most 1.5 times that on the CPU."""
    reference = make_checkpoint(tmp_path, dtype=dtype)
    llm = LLM(str(tmp_path), num_kvcache_blocks=64)
    model = llm.executor.worker.model
    compute_logits = model.compute_logits
    seen = []

    def record(hidden):
        seen.append(compute_logits(hidden))
        return seen[-1]

    monkeypatch.setattr(model, "compute_logits", record)
    prompt = random_prompt(3, 40)
    generate_ids(llm, [prompt[:length] for length in range(1, 41)], greedy(1))
    ours = torch.cat(seen).float().cpu()
    with torch.inference_mode():
        theirs = reference(torch.tensor([prompt])).logits[0].float()
        exact = reference.float()(torch.tensor([prompt])).logits[0]
    assert ours.shape == (40, VOCAB_SIZE)
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm() + 1e-5 * exact.norm()


def make_quantized(scheme, num_rows):
    layer = randomize(ColumnParallelLinear(4096, [("", 3000)], True, BF16)).to(DEVICE)
    return quantize(layer, scheme), [torch.randn(num_rows, 4096, device=DEVICE).to(BF16)]


def make_experts(num_tokens):
    x = torch.randn(num_tokens, 1024, device=DEVICE).to(BF16)
    weights, chosen = torch.rand(num_tokens, 96, device=DEVICE).topk(8)
    experts = Experts(num_experts=96, hidden_size=1024, width=384, dtype=BF16)
    return randomize(experts.to(DEVICE)), [x, chosen, weights]


def make_gated_delta(query_lens):
    """Some states are also written."""
    layer = make_delta_rule((16, 32, 128, 128), BF16).to(DEVICE)
    slots = ([1, 1, 2, 3, 4, 5, 6], [7, 8, 2, 3, 4, 5, 6])
    return layer, make_delta_step(layer, query_lens, *slots)


@pytest.mark.parametrize(
    "make, size",
    [
        *product([partial(make_quantized, INT4), partial(make_quantized, INT8)], [1, 16, 17, 300]),
        *product([make_experts], [1, 32, 33, 600]),
        *product([make_gated_delta], [[1] * 7, [1, 300, 2, 33, 1, 64, 5]]),
    ],
)
def test_large_layers_match_plain_ones_in_a_graph(make, size):
    """Which is captured with other numbers. Without a GPU, bfloat16 is multiplied incorrectly."""
    layer, args = make(size)
    expected_args = deepcopy(args)
    expected = layer(*expected_args)
    optimize(layer, "triton", BF16)
    static = deepcopy(args)
    tensors = list_tensors(static)
    for tensor in tensors:
        tensor.copy_(tensor.flip(0))
    layer(*static)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(*static)
    for tensor, own in zip(tensors, list_tensors(args)):
        tensor.copy_(own)
    graph.replay()
    for one, right in zip([output, *tensors], [expected, *list_tensors(expected_args)]):
        assert (one - right).float().norm() <= 5e-3 * right.float().norm()


def test_a_seed_samples_the_same_tokens_on_both_devices(make_llm):
    on_cpu, on_gpu = [
        make_llm(device=device, **POOL).generate(PROMPTS, SAMPLED) for device in ("cpu", "cuda")
    ]
    for one, other in zip(on_cpu, on_gpu):
        assert one["token_ids"] == other["token_ids"]
        if one["logprobs"]:
            expected = pytest.approx(one["cumulative_logprob"], abs=1e-3, rel=1e-4)
            assert other["cumulative_logprob"] == expected


def test_settings_of_the_caller_change_nothing(make_llm):
    expected = generate_ids(make_llm(**POOL), PROMPTS, SAMPLED)
    with torch.device("meta"), torch.autocast("cuda", dtype=torch.float16), torch.enable_grad():
        torch.set_float32_matmul_precision("medium")
        try:
            assert generate_ids(make_llm(**POOL), PROMPTS, SAMPLED) == expected
        finally:
            torch.set_float32_matmul_precision("highest")


def test_engines_on_the_first_and_the_last_gpu_are_independent(make_llm, expected):
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    llms = [make_llm(device=name, **POOL) for name in ("cuda:0", str(last))]
    for llm in (*llms, *llms):
        assert generate_ids(llm, PROMPTS, GREEDY) == expected
    worker = llms[1].model_runner.executor.worker
    held = [*worker.model.parameters(), *worker.kv_caches, worker.graphs.buffer]
    held += [worker.graphs.packed, worker.graphs.rows, worker.graphs.hidden]
    assert {tensor.device for tensor in held} == {last}
    assert torch.cuda.current_device() == 0
    llms[0].exit()
    assert generate_ids(llms[1], PROMPTS, GREEDY) == expected


def test_graphs_are_captured_while_another_engine_runs(make_llm, expected):
    """A capture must not fail because another thread allocates memory."""
    llm = make_llm(**POOL)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate_ids, llm, PROMPTS * 20, GREEDY)
        assert generate_ids(make_llm(**POOL), PROMPTS, GREEDY) == expected
        assert running.result() == expected * 20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_match_transformers(tiny, expected):
    with LLM(tiny[0], tensor_parallel_size=2, **POOL) as llm:
        assert generate_ids(llm, PROMPTS, GREEDY) == expected


@graphs_and_eager
def test_memory_stays_within_gpu_memory_utilization(tmp_path, enforce_eager):
    """In the largest steps too, while other tensors hold 2 GiB of the GPU."""
    make_checkpoint(
        tmp_path, dtype=torch.bfloat16, vocab_size=50_000, num_hidden_layers=8, head_dim=128,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    other = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    options = {"max_model_len": 8192, "enforce_eager": enforce_eager}
    llm = LLM(str(tmp_path), gpu_memory_utilization=0.2, **options)
    params = SamplingParams(
        max_tokens=30, ignore_eos=True, top_p=0.9, repetition_penalty=1.1, logprobs=5,
        min_tokens=5, stop_token_ids=[7],
    )  # fmt: skip
    generate_ids(llm, [random_prompt(i, 200) for i in range(300)], params)
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert 0.15 * total < taken < 0.2 * total + (256 << 20)
    del other


def test_exit_frees_the_memory(make_llm):
    generate_ids(make_llm(**POOL), PROMPTS, SAMPLED)  # allocates workspaces of cuBLAS, which stay
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    llm = make_llm(num_kvcache_blocks=100_000, kvcache_block_size=16)  # of 8 KB
    generate_ids(llm, PROMPTS, SAMPLED)
    assert torch.cuda.memory_reserved() > before + 700_000_000
    llm.exit()
    assert torch.cuda.memory_reserved() < before + 100_000_000
