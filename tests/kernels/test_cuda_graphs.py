"""A replayed CUDA graph computes the same as an eager step.

Without a GPU, a stand-in for a graph calls the captured function again on the static batch.
"""

from dataclasses import dataclass, replace
from functools import partial
from importlib import reload
from types import SimpleNamespace
from typing import Annotated

import pytest
import torch
from conftest import (
    DEVICE,
    ON_GPU,
    Oracle,
    generate_ids,
    greedy,
    make_batch,
    make_checkpoint,
    random_prompt,
)
from families import make_family
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig

from nanovllm import batch as batch_module
from nanovllm import packing
from nanovllm.batch import Batch
from nanovllm.kernels.cuda import graphs
from nanovllm.kernels.cuda.graphs import CudaGraphs, list_batch_sizes
from nanovllm.packing import pack, pack_padded, unpack
from nanovllm.worker.dummy_steps import make_dummy_batch
from nanovllm.worker.startup import make_step
from nanovllm.worker.worker import run_step

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
    window_slots = torch.zeros_like(batch.slot_mapping)
    batch = replace(batch, window_slots=window_slots, window_tables=batch.block_tables + 1)
    for tensor in (batch.input_ids, batch.positions, batch.slot_mapping, window_slots):
        tensor.copy_(torch.randint(99, (3,)))
    sizes = {"num_tokens": 8, "num_seqs": 8, "num_seqs + 1": 9, "num_seqs, max_blocks": 8 * 5}
    sizes |= {"num_window_tokens": 8, "num_seqs, max_window_blocks": 8 * 5}
    sizes |= {"num_logits": 8, "num_long_queries": 0, "max_seqlen_q": 1, "max_seqlen_k": 99}
    padded = unpack(pack_padded(batch, sizes), sizes)
    paddings = dict(input_ids=0, positions=0, slot_mapping=-1, window_slots=-1, context_lens=0)
    for name, padding in {**paddings, "logits_indices": 0}.items():
        assert getattr(padded, name).tolist() == getattr(batch, name).tolist() + [padding] * 5
    assert padded.cu_seqlens_q.tolist() == list(range(9))
    assert torch.equal(padded.block_tables[:3, :2], batch.block_tables)
    assert torch.equal(padded.window_tables[:3, :2], batch.window_tables)


def capture_nothing(step, *_):
    output = step()
    return SimpleNamespace(replay=lambda: output.copy_(step())), output


@dataclass(frozen=True)
class LongerBatch(Batch):
    # make_batch sets no values for these.
    draws: Annotated[Tensor | None, "num_logits"] = None
    states: Annotated[Tensor | None, "num_seqs", {"padding": -1}] = None


@pytest.fixture
def make_longer_batch(monkeypatch):
    """A function that makes a batch with two more fields, as if batch.py declared them."""

    def make(draws, states):
        tables = torch.zeros(len(states), 2, dtype=torch.int32)
        batch = make_batch([1] * len(states), [5] * len(states), tables)
        more = [torch.tensor(values, dtype=torch.int32) for values in (draws, states)]
        return replace(batch, draws=more[0], states=more[1])

    monkeypatch.setattr(batch_module, "Batch", LongerBatch)
    reload(packing)
    yield make
    monkeypatch.undo()
    reload(packing)


def test_new_fields_arrive_on_another_rank(make_longer_batch):
    batch = make_longer_batch([7, 8, 9], [1, 2, 3])
    received = unpack(pack(batch))
    assert type(received) is LongerBatch
    for name, value in vars(batch).items():
        assert torch.equal(torch.as_tensor(getattr(received, name)), torch.as_tensor(value)), name


def test_new_fields_arrive_in_a_replayed_graph(make_longer_batch, monkeypatch):
    monkeypatch.setattr(graphs, "capture", capture_nothing)

    class Decoder(nn.Module):
        def forward(self, batch, kv_caches):
            return torch.stack((batch.draws, batch.states), dim=1)

    caches = [torch.empty(2, 1, 16, 1, 1)]
    batch = make_longer_batch([7, 8, 9], [1, 2, 3])
    decoder = Decoder()
    step = partial(decoder, kv_caches=caches)
    replayed = CudaGraphs(step, decoder, [1, 2, 4], batch, torch.device("cpu"))
    hidden = replayed.run(batch)
    assert hidden.tolist() == [[7, 1], [8, 2], [9, 3]]
    padded = replayed.graphs[4][1]
    assert padded[3].tolist() == [0, -1]


def test_pending_ids_are_filled_in_on_the_static_buffer(monkeypatch):
    """From the tokens of the step before the replay, not before the capture."""
    monkeypatch.setattr(graphs, "capture", capture_nothing)

    class Decoder(nn.Module):
        def forward(self, batch, kv_caches):
            return batch.input_ids.clone()

    newest_tokens = torch.zeros(4, dtype=torch.int32)
    decoder = Decoder()
    step = partial(run_step, decoder, [], newest_tokens)
    batch = make_batch([1] * 3, [5] * 3, torch.zeros(3, 1, dtype=torch.int32))
    replayed = CudaGraphs(step, decoder, [4], batch, torch.device("cpu"))
    for tokens in ([7, 8, 9], [4, 5, 6]):
        newest_tokens[:3] = torch.tensor(tokens)
        ids = torch.tensor([-3, 2, -1], dtype=torch.int32)
        assert replayed.run(replace(batch, input_ids=ids)).tolist() == [tokens[2], 2, tokens[0]]


def test_a_step_with_hooks_is_not_a_replay(monkeypatch):
    """A replay would not call them."""

    def capture_once(step, *_):
        return SimpleNamespace(replay=lambda: None), step()

    class Decoder(nn.Module):
        def forward(self, batch, kv_caches):
            return batch.positions.clone()

    monkeypatch.setattr(graphs, "capture", capture_once)
    decoder = Decoder()
    batch = make_batch([1], [5], torch.zeros(1, 1, dtype=torch.int32))
    step = partial(decoder, kv_caches=[])
    captured = CudaGraphs(step, decoder, [1], batch, torch.device("cpu"))
    seen = []
    hook = decoder.register_forward_hook(lambda *args: seen.append(args))
    captured.run(batch)
    hook.remove()
    captured.run(batch)
    assert len(seen) == 1


def test_a_tensor_of_another_shape_is_an_error(make_longer_batch):
    with pytest.raises(AssertionError, match=r"draws \[num_logits\] has 2 elements, not 3"):
        pack(make_longer_batch([7, 8], [1, 2, 3]))


@pytest.fixture
def make_replaying(make_llm, monkeypatch):
    """A function that makes an engine, and a list of the sequences and rows of its replays."""

    def make(model, **options):
        llm = make_llm(
            str(model), device=DEVICE.type, attention_backend="triton", max_model_len=32,
            kvcache_block_size=16, **options,
        )  # fmt: skip
        worker = llm.executor.worker
        if not ON_GPU:
            monkeypatch.setattr(graphs, "capture", capture_nothing)
            sizes = list_batch_sizes(min(worker.plan.num_lanes, worker.max_num_batched_tokens))
            batch = make_dummy_batch(worker, [1])
            with torch.inference_mode():
                step = make_step(worker)
                worker.graphs = CudaGraphs(step, worker.model, sizes, batch, DEVICE)
        replay = worker.graphs.run
        steps = []

        def record(batch):
            hidden = replay(batch)
            assert len(hidden) == len(batch.logits_indices)
            steps.append((len(batch.context_lens), len(hidden)))
            return hidden

        monkeypatch.setattr(worker.graphs, "run", record)
        return llm, steps

    return make


@pytest.mark.parametrize("name, overlaps", [("qwen3", False), ("gemma3-untied", True)])
def test_engine_with_graphs_matches_transformers(tmp_path, make_replaying, name, overlaps):
    """Of batches that grow and shrink, with padding rows, chunks of one token and windows of 2."""
    oracle = make_family(tmp_path, name)
    llm, steps = make_replaying(tmp_path, max_num_seqs=5, max_num_batched_tokens=5)
    llm.overlaps = overlaps
    lengths = [14, 1, 2, 3, 6]  # of the prompts
    prompts = [random_prompt(i, length) for i, length in enumerate(lengths)]
    numbers = [8, 5, 7, 5, 4]
    expected = [oracle(prompt, number) for prompt, number in zip(prompts, numbers)]
    assert generate_ids(llm, prompts, [greedy(number) for number in numbers]) == expected
    assert {num_seqs for num_seqs, _ in steps} >= {1, 3, 5}
    assert any(num_seqs > num_logits for num_seqs, num_logits in steps)


@pytest.mark.parametrize("budget", [1, 15])
def test_chunks_of_one_token_without_logits_are_replayed(tmp_path, make_replaying, budget):
    """By the budget, or because a chunk ends where the state is kept: 18 = 15 + 1 + 2 tokens."""
    reference = make_checkpoint(
        tmp_path,
        family=Qwen3_5TextConfig,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    oracle = Oracle(reference)
    llm, steps = make_replaying(tmp_path, max_num_batched_tokens=budget)
    prefix = random_prompt(0, 16)
    for last in (1, 2, 3):
        prompt = [*prefix, last, last]
        assert generate_ids(llm, [prompt], greedy(2)) == [oracle(prompt, 2)]
    assert (1, 0) in steps


@pytest.mark.gpu
def test_torch_attention_is_not_captured(make_llm):
    """It reads lengths on the host."""
    assert make_llm(attention_backend="torch").model_runner.executor.worker.graphs is None
