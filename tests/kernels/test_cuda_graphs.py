"""Graphs against eager steps. Without a GPU, a stand-in repeats the recorded function on the static batch, in its place."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import DEVICE, ON_GPU, Oracle, make_batch, make_checkpoint, random_prompt
from transformers import OPTConfig

from nanovllm import LLM, SamplingParams, kernels
from nanovllm.batch import Batch
from nanovllm.kernels.cuda import graphs
from nanovllm.kernels.cuda.graphs import CudaGraphs, list_batch_sizes, pack_padded
from nanovllm.packing import copy_to, unpack

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 7, 8, 9, 40, 256, 1000])
def test_batch_sizes(max_num_seqs: int) -> None:
    """Every batch has a graph, and fewer than 8 rows or a sixteenth of it are padding."""
    sizes = list_batch_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        padding = min(size for size in sizes if size >= num_seqs) - num_seqs
        assert padding < 8 or padding < num_seqs / 8


def test_a_batch_in_the_layout_of_a_larger_one() -> None:
    """Its own rows first, then rows that write and read nothing."""
    batch = make_batch([1] * 3, [5, 3, 8], torch.randint(99, (3, 2), dtype=torch.int32))
    for name in ("input_ids", "positions", "slot_mapping"):
        getattr(batch, name)[:] = torch.randint(99, (3,))
    sizes = [8, 8, 8, 5, 1, 99, 1]
    larger = unpack(pack_padded(batch, sizes), sizes)
    for name in ("input_ids", "positions", "slot_mapping", "context_lens", "logits_indices"):
        own = getattr(batch, name)
        padding = getattr(larger, name)[len(own) :].tolist()
        assert torch.equal(getattr(larger, name)[: len(own)], own)
        assert padding == [-1 if name == "slot_mapping" else 0] * (8 - len(own))
    assert larger.cu_seqlens_q.tolist() == list(range(9)) and larger.block_tables.shape == (8, 5)
    assert torch.equal(larger.block_tables[:3, :2], batch.block_tables)
    assert (larger.max_seqlen_q, larger.max_seqlen_k) == (1, 99)


@pytest.fixture
def make_llm_with_graphs(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LLM]:
    def record(
        step: Callable[[], torch.Tensor], device: torch.device, last: object
    ) -> tuple[SimpleNamespace, torch.Tensor]:
        output = step()
        return SimpleNamespace(replay=lambda: output.copy_(step())), output

    def make(**options) -> LLM:
        llm = make_llm(
            attention_backend="triton", kvcache_block_size=16, device=DEVICE.type, **options
        )
        executor = llm.model_runner.executor.worker
        if not ON_GPU:
            with torch.inference_mode():
                sizes = list_batch_sizes(llm.config.max_num_seqs)
                executor.graphs = CudaGraphs(
                    executor.model, executor.kv_caches, sizes, executor.block_table_width
                )
        return llm

    if not ON_GPU:
        monkeypatch.setattr(graphs, "capture", record)
    return make


def test_tokens_are_the_same(
    tiny: tuple[str, Oracle], make_llm_with_graphs: Callable[..., LLM]
) -> None:
    """Growing and shrinking batches, chunks of one token, preemption, padding rows: still transformers' tokens."""
    llm = make_llm_with_graphs(
        num_kvcache_blocks=8, max_num_seqs=11, max_model_len=64, max_num_batched_tokens=18
    )
    prompts = [random_prompt(i, 1 + 5 * i) for i in range(9)]
    params = [SamplingParams(temperature=0.0, max_tokens=4 + i) for i in range(9)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [
        tiny[1](prompt, 4 + i) for i, prompt in enumerate(prompts)
    ]
    assert llm.stats["num_preemptions"]


def test_tokens_of_opt_are_the_same(
    tmp_path: Path, make_llm_with_graphs: Callable[..., LLM]
) -> None:
    """Its hidden states, on which graphs end, are narrower than what its layers compute."""
    oracle = Oracle(
        make_checkpoint(
            tmp_path, family=OPTConfig, hidden_size=64, word_embed_proj_dim=32, ffn_dim=40
        )
    )
    llm = make_llm_with_graphs(
        model=str(tmp_path), num_kvcache_blocks=16, max_num_seqs=5, max_model_len=64
    )
    prompts = [random_prompt(i, 1 + 9 * i) for i in range(3)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [oracle(prompt, 8) for prompt in prompts]
    assert llm.model_runner.executor.worker.graphs.graphs[4][1].shape == (4, 32)


def test_every_batch_size(make_llm_with_graphs: Callable[..., LLM]) -> None:
    """1 to 40 sequences (12 where the kernels are interpreted), pieces of one token among them: the hidden states of an eager
    step, and nothing written but their own slots."""
    max_num_seqs = 40 if ON_GPU else 12
    llm = make_llm_with_graphs(num_kvcache_blocks=90, max_num_seqs=max_num_seqs, max_model_len=32)
    executor = llm.model_runner.executor.worker
    for i in range(max_num_seqs):
        llm.add_request(random_prompt(i, 1 + i % 20), SamplingParams(temperature=0.0, max_tokens=8))
    llm.step()
    running = list(llm.scheduler.running)
    for seq in running:
        seq.num_scheduled_tokens = 1
        seq.num_logits = int(seq.lane % 3 != 1)
        seq.token_ids += [0] * (
            seq.lane % 3 == 1
        )  # of these, more is to come: their hidden states are not wanted
        seq.block_table += [seq.lane + 45] * (2 - len(seq.block_table))
    before = [torch.randn_like(kv_cache) for kv_cache in executor.kv_caches]

    def run(step: Callable[[Batch], torch.Tensor], batch: Batch) -> list[torch.Tensor]:
        """The hidden states and what the caches are then."""
        for kv_cache, saved in zip(executor.kv_caches, before):
            kv_cache.copy_(saved)
        return [step(batch), *[kv_cache.clone() for kv_cache in executor.kv_caches]]

    for num_seqs in range(max_num_seqs, 0, -1) if ON_GPU else (12, 11, 9, 8, 5, 3, 1):
        with torch.inference_mode():
            batch = llm.model_runner.prepare_batch(running[-num_seqs:])
            eager = run(
                lambda batch: executor.model(copy_to(batch, executor.device), executor.kv_caches),
                batch,
            )
            replayed = run(executor.graphs.run, batch)
        assert len(eager[0]) == sum(seq.lane % 3 != 1 for seq in running[-num_seqs:])
        torch.testing.assert_close(replayed, eager, atol=1e-4, rtol=1e-4)


def test_the_profile_run_records_the_largest_alone(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played on the CPU: a start with a GPU whose memory is to be measured."""
    executor, recorded, capture = (
        make_llm(max_num_seqs=20).model_runner.executor.worker,
        [],
        kernels.capture_decode_steps,
    )
    on_gpu = torch.nn.Module(), None, [SimpleNamespace(device=torch.device("cuda"))]
    monkeypatch.setattr(
        kernels,
        "capture_decode_steps",
        lambda decoder, backend, caches, **sizes: capture(*on_gpu, **sizes),
    )
    monkeypatch.setattr(
        kernels, "CudaGraphs", lambda decoder, kv_caches, sizes, width: recorded.append(sizes)
    )
    monkeypatch.setattr(
        "nanovllm.engine.worker.count_blocks", lambda *args: (args[5](), (9, "arithmetic"))[1]
    )
    executor.allocate_kv_cache()
    assert recorded == [[20], list_batch_sizes(20)]


def test_enforce_eager(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(
        attention_backend="triton", kvcache_block_size=16, device=DEVICE.type, enforce_eager=True
    )
    assert llm.model_runner.executor.worker.graphs is None


@pytest.mark.gpu
def test_torch_attention_is_not_captured(make_llm: Callable[..., LLM]) -> None:
    """It looks at lengths on the host."""
    assert make_llm(attention_backend="torch").model_runner.executor.worker.graphs is None
