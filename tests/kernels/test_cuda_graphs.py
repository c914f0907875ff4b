"""A replayed CUDA graph computes the same as an eager step.

Without a GPU, a stand-in for a graph calls the captured function again on the static batch.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import DEVICE, ON_GPU, generate_ids, greedy, make_batch, random_prompt

from nanovllm.kernels.cuda import graphs
from nanovllm.kernels.cuda.graphs import CudaGraphs, list_batch_sizes, pack_padded
from nanovllm.packing import unpack

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 9, 40, 1000])
def test_little_of_a_graph_is_padding(max_num_seqs):
    sizes = list_batch_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        padding = min(size for size in sizes if size >= num_seqs) - num_seqs
        assert padding < max(8, num_seqs / 8)


def test_padding_rows_read_and_write_nothing():
    batch = make_batch([1] * 3, [5, 3, 8], torch.randint(99, (3, 2), dtype=torch.int32))
    for tensor in (batch.input_ids, batch.positions, batch.slot_mapping):
        tensor.copy_(torch.randint(99, (3,)))
    sizes = [8, 8, 8, 5, 1, 99, 1]
    padded = unpack(pack_padded(batch, sizes), sizes)
    for name in ("input_ids", "positions", "slot_mapping", "context_lens", "logits_indices"):
        padding = -1 if name == "slot_mapping" else 0
        assert getattr(padded, name).tolist() == getattr(batch, name).tolist() + [padding] * 5
    assert padded.cu_seqlens_q.tolist() == list(range(9))
    assert torch.equal(padded.block_tables[:3, :2], batch.block_tables)


def capture_nothing(step, *_):
    output = step()
    return SimpleNamespace(replay=lambda: output.copy_(step())), output


def test_engine_with_graphs_matches_transformers(tiny, make_llm, monkeypatch):
    """Of batches that grow and shrink, with padding rows and chunks of one token."""
    options = {"max_num_seqs": 5, "max_num_batched_tokens": 5, "kvcache_block_size": 16}
    llm = make_llm(device=DEVICE.type, attention_backend="triton", max_model_len=32, **options)
    worker = llm.model_runner.executor.worker
    if not ON_GPU:
        monkeypatch.setattr(graphs, "capture", capture_nothing)
        limits = (worker.block_table_width, worker.max_model_len)
        with torch.inference_mode():
            worker.graphs = CudaGraphs(worker.model, worker.kv_caches, list_batch_sizes(5), *limits)
    replay = worker.graphs.run
    steps = []

    def record(batch):
        hidden = replay(batch)
        assert len(hidden) == len(batch.logits_indices)
        steps.append((len(batch.context_lens), len(hidden)))
        return hidden

    monkeypatch.setattr(worker.graphs, "run", record)
    lengths = [14, 1, 2, 3, 6]  # of the prompts
    prompts = [random_prompt(i, length) for i, length in enumerate(lengths)]
    numbers = [8, 5, 7, 5, 4]
    expected = [tiny[1](prompt, number) for prompt, number in zip(prompts, numbers)]
    assert generate_ids(llm, prompts, [greedy(number) for number in numbers]) == expected
    assert {num_seqs for num_seqs, _ in steps} >= {1, 3, 5}
    assert any(num_seqs > num_logits for num_seqs, num_logits in steps)


@pytest.mark.gpu
def test_torch_attention_is_not_captured(make_llm):
    """It reads lengths on the host."""
    assert make_llm(attention_backend="torch").model_runner.executor.worker.graphs is None
