"""A replayed CUDA graph computes the same as an eager step.

Without a GPU, a stand-in for a graph calls the captured function again on the static batch.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import DEVICE, ON_GPU, generate_ids, greedy, make_batch, random_prompt

from nanovllm.kernels.cuda import graphs
from nanovllm.kernels.cuda.graphs import CudaGraphs, list_batch_sizes, pack_padded
from nanovllm.packing import copy_to, unpack

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


@pytest.fixture
def make_llm_with_graphs(make_llm, monkeypatch):
    def capture(step, *_):
        output = step()
        return SimpleNamespace(replay=lambda: output.copy_(step())), output

    def make(**options):
        llm = make_llm(
            device=DEVICE.type, attention_backend="triton", kvcache_block_size=16, **options
        )
        worker = llm.model_runner.executor.worker
        if not ON_GPU:
            monkeypatch.setattr(graphs, "capture", capture)
            sizes = list_batch_sizes(llm.config.max_num_seqs)
            width = worker.block_table_width
            with torch.inference_mode():
                worker.graphs = CudaGraphs(worker.model, worker.kv_caches, sizes, width)
        return llm

    return make


def test_engine_with_graphs_matches_transformers(tiny, make_llm_with_graphs):
    """With batches that grow and shrink, preemptions and padding rows."""
    options = {"num_kvcache_blocks": 4, "max_model_len": 48, "max_num_batched_tokens": 24}
    llm = make_llm_with_graphs(max_num_seqs=5, **options)
    prompts = [random_prompt(i, 13 + i) for i in range(5)]
    lengths = [5 + i % 3 for i in range(5)]
    expected = [tiny[1](prompt, length) for prompt, length in zip(prompts, lengths)]
    assert generate_ids(llm, prompts, [greedy(length) for length in lengths]) == expected
    assert llm.stats["num_preemptions"]


def test_graphs_match_eager_steps_at_every_batch_size(make_llm_with_graphs):
    """Hidden states and KV caches. Some rows are chunks of one token, without logits."""
    batch_sizes = range(40, 0, -1) if ON_GPU else (6, 5, 3, 1)
    max_num_seqs = batch_sizes[0]
    llm = make_llm_with_graphs(num_kvcache_blocks=90, max_num_seqs=max_num_seqs, max_model_len=32)
    worker = llm.model_runner.executor.worker
    for i in range(max_num_seqs):
        llm.add_request(random_prompt(i, 1 + i % 20), greedy(8))
    llm.step()
    running = list(llm.scheduler.running)
    for seq in running:
        seq.num_scheduled_tokens = 1
        seq.num_logits = 1
        if seq.lane % 3 == 1:
            seq.num_logits = 0
            seq.token_ids.append(0)  # the chunk does not end the sequence
        seq.block_table += [seq.lane + 45] * (2 - len(seq.block_table))
    before = [torch.randn_like(kv_cache) for kv_cache in worker.kv_caches]

    def run(step, batch):
        """Return the hidden states and the KV caches after the step."""
        for kv_cache, saved in zip(worker.kv_caches, before):
            kv_cache.copy_(saved)
        return [tensor.clone() for tensor in (step(batch), *worker.kv_caches)]

    def run_eagerly(batch):
        return worker.model(copy_to(batch, worker.device), worker.kv_caches)

    for num_seqs in batch_sizes:
        with torch.inference_mode():
            batch = llm.model_runner.prepare_batch(running[-num_seqs:])
            eager = run(run_eagerly, batch)
            replayed = run(worker.graphs.run, batch)
        assert len(eager[0]) == sum(seq.num_logits for seq in running[-num_seqs:])
        torch.testing.assert_close(replayed, eager, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_torch_attention_is_not_captured(make_llm):
    """It reads lengths on the host."""
    assert make_llm(attention_backend="torch").model_runner.executor.worker.graphs is None
