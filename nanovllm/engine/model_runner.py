"""Turns scheduled sequences into a batch of plain numbers, has it run, and samples. Knows sequences, never queues.

The block tables live here as one array with a row per lane, and only what is new is copied into it, instead of all blocks of
all contexts at every step.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanovllm import kernels
from nanovllm.batch import Batch, SamplingBatch, to_device
from nanovllm.config import Config
from nanovllm.engine.penalties import Penalties
from nanovllm.engine.ranks import Ranks
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import Sampler, make_noise_keys
from nanovllm.models.decoder import ModelSpec
from nanovllm.outputs import Logprobs
from nanovllm.sampling_params import SamplingParams


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Within it, compute on this engine's GPU, in the dtypes that the tensors have, and without autograd.

    Triton and CUDA graphs take the GPU that is the current one. The index of a CPU is None, which changes nothing.
    """
    with torch.inference_mode(), torch.accelerator.device_index(device.index), torch.autocast(device.type, enabled=False):
        yield


class ModelRunner:
    """Raises ValueError as Executor does, RuntimeError as Ranks does."""

    def __init__(self, config: Config, spec: ModelSpec, directory: Path) -> None:
        self.ranks = Ranks(config, spec, directory)
        weakref.finalize(self, self.ranks.stop, "the engine is gone")  # also at the interpreter's end
        self.executor = executor = self.ranks.executor
        self.vocab_size, self.device, self.block_size = spec.vocab_size, executor.device, executor.block_size
        self.sampler = Sampler(spec.vocab_size).to(self.device)
        if config.enable_kernels:
            kernels.kernelize(self.sampler, self.device, spec.dtype)
        self.penalties = Penalties(spec.vocab_size, executor.max_model_len, self.device)
        with undisturbed(self.device):  # since CUDA graphs repeat what they are recorded with
            self.ranks.call(executor.allocate_kv_cache, self._sample_all)
        self.num_lanes = min(config.max_num_seqs, executor.num_blocks)  # a running sequence holds at least one block
        # Row: a lane's block table. copied_from: by lane, the list that it is a copy of, and how many blocks are copied.
        self.block_tables = np.zeros((self.num_lanes, executor.block_table_width), dtype=np.int32)
        self.copied_from: list[tuple[list[int], int]] = [([], 0)] * self.num_lanes

    def run(self, seqs: list[Sequence]) -> Tensor:
        """Compute the scheduled tokens of `seqs`; logits [num_caught_up, vocab_size] of those that have then caught up."""
        with undisturbed(self.device):
            return self.ranks.call(self.executor.run, self.prepare_batch(seqs))

    def sample(self, logits: Tensor, seqs: list[Sequence]) -> tuple[list[int], Logprobs]:
        """For each row of logits: the token that comes next (-1 if they are NaN) and, where any of `seqs` asks for it, the log
        probabilities of the most probable tokens and of that one. A sequence that has caught up has 1 + len(draft) rows."""
        if len(logits) < len(seqs):  # nobody has a draft: there is budget for one only if all catch up
            seqs = [seq for seq in seqs if seq.num_computed_tokens + seq.num_scheduled_tokens == len(seq.token_ids)]
        positions = [len(seq.token_ids) for seq in seqs]  # of the tokens that come next
        if len(logits) > len(seqs):
            positions = [len(seq.token_ids) + i for seq in seqs for i in range(1 + len(seq.draft))]
            seqs = [seq for seq in seqs for _ in range(1 + len(seq.draft))]
        with undisturbed(self.device):
            processed = logits
            if needs_processing := any([seq.needs_logits_processing for seq in seqs]):
                processed = self.penalties.apply(logits, seqs)
            tokens = self.sampler(processed, self.prepare_sampling(seqs, positions))
            token_ids = self.ranks.call(tokens.tolist)  # here the host waits, and gives up if a rank is lost
            return token_ids, self._find_logprobs(logits, tokens, seqs) if needs_processing else None

    def prepare_batch(self, seqs: list[Sequence]) -> Batch:
        """Flatten the sequences' scheduled tokens, on the host; batch.py draws the result.

        With block size 4, a sequence of 7 tokens whose block table is [5, 2] and that has computed 4 of them gives
        input_ids [t4, t5, t6], positions [4, 5, 6] and, since 4 // 4 is its logical block 1, which is block 2,
        slot_mapping [2 * 4 + 0, 2 * 4 + 1, 2 * 4 + 2] = [8, 9, 10]; context_len 7, block_tables row [5, 2].
        """
        input_ids: list[int] = []
        for seq in seqs:
            start = seq.num_computed_tokens
            input_ids += seq.token_ids[start : start + seq.num_scheduled_tokens]
            input_ids += seq.draft
            self._copy_block_table(seq)
        starts = np.array([seq.num_computed_tokens for seq in seqs], np.int32)
        query_lens = np.array([seq.num_scheduled_tokens + len(seq.draft) for seq in seqs], np.int32)
        num_tokens = np.array([len(seq.token_ids) for seq in seqs])
        context_lens = starts + query_lens
        cu_seqlens_q = np.concatenate(([0], query_lens.cumsum()), dtype=np.int32)
        max_seqlen_k = int(context_lens.max())
        lanes = [seq.lane for seq in seqs]
        block_tables = self.block_tables[lanes, : -(-max_seqlen_k // self.block_size)]

        row = np.repeat(np.arange(len(seqs)), query_lens)  # of each token
        positions = np.arange(len(input_ids), dtype=np.int32) + (starts - cu_seqlens_q[:-1])[row]
        blocks, offsets = np.divmod(positions, self.block_size)
        slot_mapping = block_tables[row, blocks] * self.block_size + offsets
        tensor = torch.from_numpy
        return Batch(
            input_ids=tensor(np.array(input_ids, np.int32)),
            positions=tensor(positions),
            slot_mapping=tensor(slot_mapping),
            cu_seqlens_q=tensor(cu_seqlens_q),
            context_lens=tensor(context_lens),
            block_tables=tensor(block_tables),
            max_seqlen_q=int(query_lens.max()),
            max_seqlen_k=max_seqlen_k,
            logits_indices=tensor(np.flatnonzero(positions >= num_tokens[row] - 1).astype(np.int32)),  # the newest, its draft
            min_seqlen_q=int(query_lens.min()),
        )

    def prepare_sampling(self, seqs: list[Sequence], positions: list[int]) -> SamplingBatch:
        """What the params of `seqs` ask for, as tensors of a row each. `positions`: those of the tokens to be drawn."""
        params = [seq.params for seq in seqs]
        temperatures = [p.temperature for p in params]
        if not any(temperatures):
            return SamplingBatch()
        tensor = partial(to_device, device=self.device)
        keys = make_noise_keys([seq.seed for seq in seqs], positions)
        noise = tensor(np.array(temperatures, np.float32)), tensor(keys)
        filtered = [i for i, p in enumerate(params) if p.temperature and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)]
        if not filtered:
            return SamplingBatch(*noise)
        top_ks = [min(params[i].top_k, self.vocab_size) if params[i].top_k > 0 else self.vocab_size for i in filtered]
        top_ps = [params[i].top_p if params[i].top_p < 1.0 else 2.0 for i in filtered]  # a rounded sum may reach 1 too early
        rows, counts = tensor(np.array([filtered, top_ks]))
        numbers = [temperatures[i] for i in filtered], top_ps, [params[i].min_p for i in filtered]
        filtered_temperatures, masses, min_ps = tensor(np.array(numbers, np.float32))
        return SamplingBatch(*noise, rows, filtered_temperatures, counts, masses, min_ps, max(top_ks))

    def _sample_all(self, logits: Tensor) -> None:
        """The end of a trial step: every row is sampled in each way, the costliest one last. Nothing of it stays."""
        costliest = SamplingParams(top_p=0.5, repetition_penalty=2.0, min_tokens=1, logprobs=20)
        for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5), costliest):
            lengths = [self.executor.max_model_len] + [1] * (len(logits) - 1)  # the longest decides what penalties take
            seqs = [Sequence(i, [0] * n, params, stop_token_ids=frozenset([0])) for i, n in enumerate(lengths)]
            for lane, seq in enumerate(seqs):
                seq.lane = lane
            self.sample(logits, seqs)
        self.penalties = Penalties(self.vocab_size, self.executor.max_model_len, self.device)

    def _find_logprobs(self, logits: Tensor, tokens: Tensor, seqs: list[Sequence]) -> Logprobs:
        """Log-softmax of the untouched logits, for the sequences that want it: the top k and the chosen token's."""
        nums = {row: num for row, seq in enumerate(seqs) if (num := seq.params.logprobs) is not None}
        if not nums:
            return None
        wanted = to_device(np.array(list(nums)), self.device)
        logprobs = logits[wanted].float().log_softmax(-1)
        top_ids = logprobs.topk(min(max(nums.values()), self.vocab_size)).indices
        token_ids = torch.cat((top_ids, tokens[wanted, None].clamp(min=0)), dim=1)  # instead of -1, where nobody will look
        found: list[dict[int, float] | None] = [None] * len(seqs)
        for (row, num), ids, values in zip(nums.items(), token_ids.tolist(), logprobs.gather(1, token_ids).tolist()):
            entries = list(zip(ids, values))
            found[row] = dict([*entries[:num], entries[-1]])
        return found

    def _copy_block_table(self, seq: Sequence) -> None:
        """Bring the lane's row up to date. Blocks that hold tokens never change; the lane's next sequence has another list."""
        table = seq.block_table
        source, num_copied = self.copied_from[seq.lane]
        if source is not table:
            num_copied = 0
        if num_copied < len(table):
            self.block_tables[seq.lane, num_copied : len(table)] = table[num_copied:]
            self.copied_from[seq.lane] = (table, -(-len(seq.token_ids) // self.block_size))
