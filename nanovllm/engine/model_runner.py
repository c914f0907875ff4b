"""Turns scheduled sequences into a Batch, runs it, and turns logits into tokens.

It reads sequences and never touches the queues.
"""

import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.config import Config
from nanovllm.engine.extension import Extension
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logprobs import find_logprobs
from nanovllm.layers.penalties import apply_penalties
from nanovllm.layers.sampler import Sampler, make_sampling_batch
from nanovllm.models.spec import ModelSpec
from nanovllm.outputs import Logprobs
from nanovllm.utils.arithmetic import cdiv
from nanovllm.worker.device import engine_settings
from nanovllm.worker.dummy_sampling import sample_each_kind, sample_test_rows
from nanovllm.worker.executor import Executor, MultiRankExecutor
from nanovllm.worker.startup import start_worker
from nanovllm.worker.state_slots import FIRST_LANE

Value = TypeVar("Value")
# Changes logits [num_rows, vocab_size], of which each row has a sequence.
LogitsProcessor = Callable[[Tensor, list[Sequence]], Tensor]


class ModelRunner:
    """Turns scheduled sequences into sampled tokens, through the workers of all ranks.

    Raises ValueError as load_worker and start_worker do.
    Raises RuntimeError as MultiRankExecutor does.
    """

    def __init__(self, config: Config, spec: ModelSpec, directory: Path) -> None:
        executor_class = Executor if config.tensor_parallel_size == 1 else MultiRankExecutor
        self.executor = executor_class(config, spec, directory)
        weakref.finalize(self, self.executor.stop, "the engine is gone")  # also at interpreter exit
        self.extensions = Extension()  # none while the engine starts
        self.processors: list[LogitsProcessor] = [apply_penalties]
        worker = self.executor.worker
        self.vocab_size = spec.vocab_size
        self.device = worker.device
        self.block_size = worker.block_size
        self.sampler = Sampler(spec.vocab_size).to(self.device)
        with engine_settings(self.device):  # CUDA graphs are captured with these
            if worker.kernels is not None:
                self_test = partial(sample_test_rows, self.sampler, spec.dtype, Sequence)
                run = self_test if self.device.type == "cuda" else None
                worker.kernels.kernelize(self.sampler, self.device, spec.dtype, run)
            sample = partial(sample_each_kind, worker, self.sample, Sequence)
            self.executor.call(start_worker, worker, sample)
        self.num_lanes = worker.num_lanes
        # The block tables of all lanes, so that a decode need not copy its whole table.
        self.block_tables = np.zeros((self.num_lanes, worker.block_table_width), np.int32)
        # Those of the second pool, if there is one. features/windows.py writes and resets them.
        self.window_tables = np.zeros_like(self.block_tables) if worker.num_window_blocks else None

    def forward(self, seqs: list[Sequence]) -> Tensor:
        """Compute the scheduled tokens. Return logits [num_logits of all seqs, vocab_size]."""
        batch = self.extensions.prepared(seqs, self.prepare_batch(seqs))
        return self.executor.call(self._execute, batch)

    def _execute(self, batch: Batch) -> Tensor:
        worker = self.executor.worker
        hidden = worker.execute(batch)
        if len(hidden) <= worker.max_num_logits:
            return self.extensions.computed(batch, worker.compute_logits(hidden))
        parts: list[Tensor] = []
        for part in hidden.split(worker.max_num_logits):
            parts.append(self.extensions.computed(batch, worker.compute_logits(part)))
        return torch.cat(parts)

    def prepare_batch(self, seqs: list[Sequence]) -> Batch[np.ndarray]:
        """Flatten the scheduled tokens, on the host. batch.py draws the result.

        Example with block size 4: a sequence of 7 tokens has computed 4, and its block table is
        [5, 2]. Its input_ids are [t4, t5, t6], its positions [4, 5, 6]. Position 4 is in logical
        block 4 // 4 = 1, which is block 2. Its slot_mapping is [2 * 4, 2 * 4 + 1, 2 * 4 + 2].
        """
        block_size = self.block_size
        for seq in seqs:
            # A decode copies its block table only when it enters a block. Earlier steps of the
            # sequence have copied all other entries, because its first step copied the whole table.
            if seq.num_scheduled_tokens > 1 or seq.num_computed_tokens % block_size == 0:
                self.block_tables[seq.lane, : len(seq.block_table)] = seq.block_table
        context_lens = [seq.num_computed_tokens + seq.num_scheduled_tokens for seq in seqs]
        max_seqlen_q = max([seq.num_scheduled_tokens for seq in seqs])
        max_seqlen_k = max(context_lens)
        seq_index, arrays = flatten_decodes(seqs) if max_seqlen_q == 1 else flatten(seqs)
        lanes = np.array([seq.lane for seq in seqs], np.int32)
        blocks, offsets = np.divmod(arrays["positions"], block_size)
        num_columns = cdiv(max_seqlen_k, block_size)
        block_tables = self.block_tables[lanes, :num_columns]
        # Both are empty, unless there is a second pool of blocks.
        window_tables = block_tables[:, :0]
        window_slots = lanes[:0]
        if self.window_tables is not None:
            window_tables = self.window_tables[lanes, :num_columns]
            window_slots = window_tables[seq_index, blocks] * block_size + offsets
        # The state slots of the lanes. An extension chooses others if a model has recurrent states.
        state_slots = lanes + FIRST_LANE
        return Batch(
            **arrays,
            slot_mapping=block_tables[seq_index, blocks] * block_size + offsets,
            context_lens=np.array(context_lens, np.int32),
            block_tables=block_tables,
            read_slots=state_slots,
            write_slots=state_slots,
            window_slots=window_slots,
            window_tables=window_tables,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    def sample(self, logits: Tensor, seqs: list[Sequence]) -> tuple[list[list[int]], Logprobs]:
        """Sample num_logits tokens for each sequence, -1 where the logits are NaN.

        Return the token ids and their log probabilities, each with one list per sequence. The log
        probabilities are None if no sequence asks for them.
        """
        rows, positions = list_rows(seqs)
        assert len(logits) == len(rows), "one row of logits for each token that is sampled"
        processed = logits
        if any([seq.needs_logits_processing for seq in seqs]):
            for process in self.processors:
                processed = process(processed, rows)
        batch = make_sampling_batch(rows, positions, self.vocab_size, self.device)
        tokens = self.sampler(processed, batch)
        token_ids = self.executor.call(tokens.tolist)  # a host synchronization
        logprobs: Logprobs = None
        if any([seq.params.logprobs is not None for seq in seqs]):
            # Of the unchanged logits, because log probabilities are the model's own.
            requested = [seq.params.logprobs for seq in rows]
            logprobs = split_rows(find_logprobs(logits, tokens, requested), seqs)
        return split_rows(token_ids, seqs), logprobs


def flatten(seqs: list[Sequence]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the sequence of each token, 0 0 0 1 2 2 in batch.py, and int32 arrays of a Batch."""
    input_ids: list[int] = []
    for seq in seqs:
        start = seq.num_computed_tokens
        input_ids += seq.token_ids[start : start + seq.num_scheduled_tokens]
    numbers = [(seq.num_computed_tokens, seq.num_scheduled_tokens, seq.num_logits) for seq in seqs]
    starts, query_lens, num_logits = np.array(numbers, np.int32).T
    cu_seqlens_q = np.concatenate(([0], query_lens.cumsum()), dtype=np.int32)
    seq_index = np.repeat(np.arange(len(seqs)), query_lens)
    offset_in_query = np.arange(len(input_ids), dtype=np.int32) - cu_seqlens_q[seq_index]
    first_offsets = query_lens - num_logits  # those of each query's first token with logits
    has_logits = offset_in_query >= first_offsets[seq_index]
    return seq_index, {
        "input_ids": np.array(input_ids, np.int32),
        "positions": starts[seq_index] + offset_in_query,
        "cu_seqlens_q": cu_seqlens_q,
        "logits_indices": np.flatnonzero(has_logits).astype(np.int32),
        "prefills": np.flatnonzero(query_lens > 1).astype(np.int32),
    }


def flatten_decodes(seqs: list[Sequence]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """As `flatten`, if each sequence has one token. This takes half as long for 256 of them."""
    positions = [seq.num_computed_tokens for seq in seqs]
    input_ids = [seq.token_ids[position] for seq, position in zip(seqs, positions)]
    logits_indices = [index for index, seq in enumerate(seqs) if seq.num_logits > 0]
    cu_seqlens_q = np.arange(len(seqs) + 1, dtype=np.int32)
    seq_index = cu_seqlens_q[:-1]
    return seq_index, {
        "input_ids": np.array(input_ids, np.int32),
        "positions": np.array(positions, np.int32),
        "cu_seqlens_q": cu_seqlens_q,
        "logits_indices": np.array(logits_indices, np.int32),
        "prefills": np.empty(0, np.int32),
    }


def list_rows(seqs: list[Sequence]) -> tuple[list[Sequence], list[int]]:
    """Return the sequence of each row of logits, and the position of the token that it samples."""
    if all([seq.num_logits == 1 for seq in seqs]):  # faster than the loop, with the same result
        return seqs, [len(seq.token_ids) for seq in seqs]
    rows: list[Sequence] = []
    positions: list[int] = []
    for seq in seqs:
        end = len(seq.token_ids)
        rows += [seq] * seq.num_logits
        positions += range(end - seq.num_logits + 1, end + 1)
    return rows, positions


def split_rows(values: list[Value], seqs: list[Sequence]) -> list[list[Value]]:
    """Split values, one per row of logits, into one list per sequence."""
    ends = accumulate([seq.num_logits for seq in seqs])
    return [values[end - seq.num_logits : end] for seq, end in zip(seqs, ends)]
