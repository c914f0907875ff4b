"""Turns a step into a Batch, runs it, and turns logits into tokens.

It reads sequences, and does not know the queues. Only the features that it calls change sequences.
"""

import weakref
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch.batch import Batch, make_batch
from nanovllm.batch.packing import to_device
from nanovllm.config import Config
from nanovllm.engine.feature import Features
from nanovllm.engine.outputs import Logprobs
from nanovllm.engine.rows import Rows
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.logprobs import find_logprobs, read_logprobs
from nanovllm.layers.penalties import apply_penalties
from nanovllm.layers.sampler import Sampler, make_sampling_batch
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.helpers import cdiv
from nanovllm.worker.device import engine_settings
from nanovllm.worker.dummy_steps import SAMPLING_KINDS, sample_test_rows
from nanovllm.worker.executor import Executor, MultiRankExecutor
from nanovllm.worker.state_slots import FIRST_LANE


class Sampled:
    """The tokens that a step has sampled, and log probabilities, on their way to the host.

    On a GPU, the copies are queued behind the sampling. An event tells when they are complete, so
    the host need not wait for the next step, which may be launched before these tokens are read.
    """

    def __init__(self, step: Step, rows: list[Sequence], logits: Tensor, tokens: Tensor) -> None:
        self.step = step
        self.requested = [seq.params.logprobs for seq in rows]
        found = find_logprobs(logits, tokens, self.requested)  # the model's own
        self.on_host = [each.to("cpu", non_blocking=True) for each in (tokens, *found)]
        self.copied: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> tuple[list[int], list[dict[int, float]] | None]:
        """Return what each row has sampled, after the event."""
        tokens, *found = self.on_host
        return tokens.tolist(), read_logprobs(found, self.requested) if found else None


class ModelRunner:
    """Turns scheduled sequences into sampled tokens, through the workers of all ranks."""

    def __init__(self, config: Config, spec: ModelSpec, directory: Path) -> None:
        executor_class = Executor if config.tensor_parallel_size == 1 else MultiRankExecutor
        self.executor = executor_class(config, spec, directory)
        weakref.finalize(self, self.executor.stop, "the engine is gone")  # also at interpreter exit
        self.features = Features()  # none while the engine starts
        worker = self.executor.worker
        self.vocab_size = spec.vocab_size
        self.device = worker.device
        self.block_size = worker.block_size
        self.sampler = Sampler(spec.vocab_size).to(self.device)
        with engine_settings(self.device):  # CUDA graphs are captured with these
            if worker.kernels is not None:
                self_test = partial(sample_test_rows, self.sampler, spec.dtype)
                run = self_test if self.device.type == "cuda" else None
                worker.kernels.kernelize(self.sampler, self.device, spec.dtype, run)
            self.executor.start(self.sample_each_kind)
        # The block tables of all lanes, so that a decode need not copy its whole table.
        self.block_tables = np.zeros((worker.plan.num_lanes, worker.block_table_width), np.int32)

    def forward(self, step: Step) -> Tensor:
        """Launch the tokens of a step. Return logits [num_logits of all, vocab_size]."""
        rows = Rows(step, self.features.wanted_rows)
        batch = self.prepare_batch(step, rows.counts)
        for feature in self.features.prepared:
            batch = feature.prepared(step, batch)
        logits = self.executor.execute(batch, rows.hand_out)
        for feature in self.features.computed:
            feature.computed(step, logits)
        return logits

    def prepare_batch(self, step: Step, num_rows: list[int]) -> Batch[np.ndarray]:
        """Flatten the tokens of a step, on the host. batch/batch.py draws it.

        The last `num_rows` tokens of each sequence need logits.
        """
        block_size = self.block_size
        input_ids: list[int] = []
        context_lens: list[int] = []
        for seq, num_tokens in zip(step.seqs, step.num_tokens):
            start = seq.num_computed_tokens
            if num_tokens == 1:
                input_ids.append(seq.token_ids[start])
            else:
                input_ids += seq.token_ids[start : start + num_tokens]
            # A decode copies its block table only when it enters a block. An admission starts at a
            # block boundary, so the first step of a sequence copies its whole table.
            if num_tokens > 1 or start % block_size == 0:
                self.block_tables[seq.lane, : len(seq.block_table)] = seq.block_table
            context_lens.append(start + num_tokens)
        lanes = np.array([seq.lane for seq in step.seqs], np.int32)
        num_blocks = cdiv(max(context_lens), block_size)
        return make_batch(
            step.num_tokens,
            context_lens,
            self.block_tables[lanes, :num_blocks],
            block_size,
            input_ids,
            num_rows,
            state_slots=lanes + FIRST_LANE,  # a feature chooses others for recurrent states
        )

    def sample(self, logits: Tensor, step: Step) -> Sampled:
        """Launch the sampling of num_logits tokens for each sequence, without waiting for them.

        Sequences that have ended since the step was planned are dropped.
        """
        if any([seq.finish_reason is not None for seq in step.seqs]):
            left = np.array(step.drop_ended(), np.int64)
            logits = logits[to_device(left, self.device)]
        rows, positions = step.list_rows()
        assert len(logits) == len(rows), "one row of logits for each token that is sampled"
        processed = logits
        if any([seq.params.changes_logits for seq in rows]):
            for feature in self.features.processed:
                processed = feature.processed(rows, processed)
            processed = apply_penalties(processed, rows)
        batch = make_sampling_batch(rows, positions, self.vocab_size, self.device)
        tokens = self.sampler(processed, batch)
        self.executor.worker.newest_tokens[: len(tokens)] = tokens
        return Sampled(step, rows, logits, tokens)

    def read(self, sampled: Sampled) -> tuple[list[list[int]], Logprobs]:
        """Wait for a step. Return each sequence's valid tokens, and their log probabilities."""
        step = sampled.step
        if sampled.copied is not None:
            self.executor.synchronize(sampled.copied)  # the only host synchronization of a step
        tokens, entries = sampled.read()
        token_ids = step.split(tokens)
        logprobs = None if entries is None else step.split(entries)
        for feature in reversed(self.features.sampled):
            token_ids = feature.sampled(step, token_ids)
        return token_ids, logprobs

    def sample_each_kind(self, logits: Tensor) -> None:
        """Sample from the `logits` [num_rows, vocab_size] of a dummy step in each way.

        On a GPU this lets MemoryMeter see the peak of sampling, and compiles the kernels. The
        memory of penalties depends on the longest sequence.
        """
        for params in SAMPLING_KINDS:
            step = Step()
            for seq_id in range(len(logits)):
                num_tokens = self.executor.worker.max_model_len if seq_id == 0 else 1
                seq = Sequence(seq_id, [0] * num_tokens, params, stop_token_ids=frozenset([0]))
                step.add(seq, num_tokens=1, num_logits=1)
            self.read(self.sample(logits, step))
