"""Turns scheduled sequences into tensors, runs the model over them and samples. Knows tensors, never queues.

It settles what depends on checkpoint and machine: device, attention backend, block size, number of blocks and
max_model_len. The block tables live here as one array with a row per lane, and only what is new is copied into it, so
that a step's host work does not grow with the length of the contexts.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, to_device
from nanovllm.engine.cuda_graphs import CudaGraphs
from nanovllm.engine.kv_cache import MemoryMeter, count_blocks
from nanovllm.engine.penalties import Penalties
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.attention import select_backend
from nanovllm.layers.sampler import Sampler, SamplingBatch
from nanovllm.models.decoder import CausalLM, DecoderSpec
from nanovllm.models.weights import fill_with_noise, load_checkpoint
from nanovllm.sampling_params import SamplingParams

_DEFAULT_MAX_MODEL_LEN = 4096


class ModelRunner:
    def __init__(self, config: Config, spec: DecoderSpec, directory: Path) -> None:
        self.config = config
        self.spec = spec
        self.device = _find_device(config.device)
        self.backend, self.block_size = select_backend(
            config.attention_backend, self.device, spec.dtype, spec.head_dim, config.kvcache_block_size
        )
        if (config.max_model_len or 0) > spec.max_len:
            raise ValueError(f"max_model_len={config.max_model_len} is above the model's own limit: lower it to {spec.max_len}")
        self.max_model_len = config.max_model_len or min(spec.max_len, _DEFAULT_MAX_MODEL_LEN)

        meter = MemoryMeter(self.device)
        with torch.device(self.device):
            self.model = CausalLM(spec, self.backend)
        if config.load_format == "dummy":
            fill_with_noise(self.model, config.seed)
        else:
            with torch.device("cpu"):  # where safetensors reads, whatever the caller's default device is
                load_checkpoint(self.model, directory)
        self.model.pack()
        self.penalties = Penalties(config.max_num_seqs, spec.vocab_size, self.device)
        self.sampler = Sampler(spec.vocab_size, self.device)

        self._allocate_kv_caches(num_blocks=1)
        self.num_blocks, arithmetic = count_blocks(config, spec, self.block_size, self.max_model_len, meter, self._rehearse)
        capacity = self.num_blocks * self.block_size
        if (config.max_model_len or 0) > capacity:
            raise ValueError(
                f"max_model_len={config.max_model_len} is more than the KV cache holds: lower it to {capacity},"
                f" or give the cache more memory (num_kvcache_blocks, kvcache_memory_bytes, gpu_memory_utilization)"
            )
        self.max_model_len = min(self.max_model_len, capacity)
        try:
            self._allocate_kv_caches(self.num_blocks)
        except RuntimeError as error:  # torch's own for any device that is out of memory
            raise ValueError(f"no memory for num_kvcache_blocks={self.num_blocks}: {arithmetic}") from error
        self._record_graphs()
        backend_name = self.backend.__name__.rpartition(".")[2]
        print(f"nanovllm: {self.device}, {spec.dtype}, {backend_name} attention; {arithmetic}", file=sys.stderr)

    def _allocate_kv_caches(self, num_blocks: int) -> None:
        spec = self.spec
        shape = (2, num_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)
        self.graphs: CudaGraphs | None = None  # first of all let go of the old ones
        self.kv_caches: list[Tensor] = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.kv_caches = [torch.empty(shape, dtype=spec.dtype, device=self.device) for _ in range(spec.num_layers)]
        if self.device.type == "cpu":  # Linux finds memory when it is written first: for the blocks used first, now
            num_first = -(-self.config.max_num_batched_tokens // self.block_size)
            for kv_cache in self.kv_caches:
                kv_cache[:, :num_first].zero_()
        # Row: a lane's block table. Next to it, the list that it is a copy of and how much of that is copied.
        width = -(-self.max_model_len // self.block_size)
        self.block_tables = np.zeros((self.config.max_num_seqs, width), dtype=np.int32)
        self.copied_from: list[tuple[list[int], int]] = [([], 0)] * self.config.max_num_seqs

    @torch.inference_mode()
    def run(self, seqs: list[Sequence]) -> tuple[list[int], list[dict[int, float] | None] | None]:
        """Compute the scheduled tokens of `seqs`. For each one that has then caught up, in order: its next token (-1 if its
        logits are NaN) and, where any of them asks for it, the log probabilities of the most probable ones and of that.
        """
        with torch.autocast(self.device.type, enabled=False):  # the caller's own would change dtypes between two kernels
            batch = self.prepare_batch(seqs)
            if self.graphs is not None and batch.max_seqlen_q == 1:
                hidden = self.graphs.run(batch)
            else:
                hidden = self.model(batch, self.kv_caches)
            logits = self.model.compute_logits(hidden)
            sampled = seqs
            if len(batch.logits_indices) < len(seqs):
                sampled = [seq for seq in seqs if seq.num_computed_tokens + seq.num_scheduled_tokens == len(seq.token_ids)]
            sampling_batch = self.prepare_sampling(sampled)
            if not any([seq.needs_logits_processing for seq in sampled]):
                return self.sampler(logits, sampling_batch).tolist(), None
            tokens = self.sampler(self.penalties.apply(logits, sampled), sampling_batch)
            return tokens.tolist(), self._find_logprobs(logits, tokens, sampled)

    def prepare_batch(self, seqs: list[Sequence]) -> Batch:
        """Flatten the sequences' scheduled tokens; see batch.py for a picture."""
        input_ids: list[int] = []
        for seq in seqs:
            start = seq.num_computed_tokens
            input_ids += seq.token_ids[start : start + seq.num_scheduled_tokens]
            self._copy_block_table(seq)
        starts = np.array([seq.num_computed_tokens for seq in seqs])
        query_lens = np.array([seq.num_scheduled_tokens for seq in seqs])
        num_tokens = np.array([len(seq.token_ids) for seq in seqs])
        context_lens = starts + query_lens
        cu_seqlens_q = np.concatenate(([0], query_lens.cumsum()))
        max_seqlen_k = int(context_lens.max())
        lanes = [seq.lane for seq in seqs]
        block_tables = self.block_tables[lanes, : -(-max_seqlen_k // self.block_size)]

        row = np.repeat(np.arange(len(seqs)), query_lens)  # of each token
        positions = np.arange(len(input_ids)) + (starts - cu_seqlens_q[:-1])[row]
        blocks, offsets = np.divmod(positions, self.block_size)
        slot_mapping = block_tables[row, blocks].astype(np.int64) * self.block_size + offsets
        tensor = partial(to_device, device=self.device)
        return Batch(
            input_ids=tensor(np.array(input_ids)),
            positions=tensor(positions),
            slot_mapping=tensor(slot_mapping),
            cu_seqlens_q=tensor(cu_seqlens_q.astype(np.int32)),
            context_lens=tensor(context_lens.astype(np.int32)),
            block_tables=tensor(block_tables),
            max_seqlen_q=int(query_lens.max()),
            max_seqlen_k=max_seqlen_k,
            logits_indices=tensor(cu_seqlens_q[1:][context_lens == num_tokens] - 1),
        )

    def prepare_sampling(self, seqs: list[Sequence]) -> SamplingBatch:
        params, seeds = [seq.params for seq in seqs], [seq.seed for seq in seqs]
        positions = [len(seq.token_ids) for seq in seqs]
        return SamplingBatch.build(params, seeds, positions, self.spec.vocab_size, self.device)

    def _find_logprobs(self, logits: Tensor, tokens: Tensor, seqs: list[Sequence]) -> list[dict[int, float] | None] | None:
        """Log-softmax of the untouched logits, for the sequences that want it: the top k and the chosen token's."""
        rows = [row for row, seq in enumerate(seqs) if seq.params.logprobs is not None]
        if not rows:
            return None
        logprobs = logits[rows].float().log_softmax(-1)
        top, top_ids = logprobs.topk(min(max(seqs[row].params.logprobs for row in rows), self.spec.vocab_size))
        chosen_ids = tokens[rows].clamp(min=0)  # -1: nobody will look
        chosen = logprobs.gather(-1, chosen_ids[:, None]).squeeze(-1)
        found: list[dict[int, float] | None] = [None] * len(seqs)
        columns = (top.tolist(), top_ids.tolist(), chosen.tolist(), chosen_ids.tolist())
        for row, values, token_ids, chosen_logprob, chosen_id in zip(rows, *columns):
            k = seqs[row].params.logprobs
            found[row] = {**dict(zip(token_ids[:k], values[:k])), chosen_id: chosen_logprob}
        return found

    def _copy_block_table(self, seq: Sequence) -> None:
        """Bring the lane's row up to date. A block table only grows; a lane's next tenant has another list."""
        table = seq.block_table
        source, num_copied = self.copied_from[seq.lane]
        if source is not table:
            num_copied = 0
        if num_copied < len(table):
            self.block_tables[seq.lane, num_copied : len(table)] = table[num_copied:]
            self.copied_from[seq.lane] = (table, len(table))

    def _rehearse(self) -> None:
        """Have all the memory allocated that serving will take: by the CUDA graphs, then by the largest step: one of
        max_num_batched_tokens and max_num_seqs sampled rows. All of it on a cache of one block."""
        self._record_graphs()
        num_tokens, num_seqs = self.config.max_num_batched_tokens, self.config.max_num_seqs
        seqs: list[Sequence] = []
        for lane in range(min(num_tokens, num_seqs)):
            longest = num_tokens - (num_seqs - lane - 1)  # the others get a token each
            query_len = max(1, min(self.max_model_len, longest))
            seq = Sequence(lane, [0] * query_len, SamplingParams(temperature=1.0, top_p=0.5))
            seq.lane, seq.num_scheduled_tokens = lane, query_len
            seq.block_table = [0] * -(-query_len // self.block_size)
            seqs.append(seq)
            num_tokens -= query_len
        self.run(seqs)

    @torch.inference_mode()
    def _record_graphs(self) -> None:
        if self.device.type == "cuda" and self.backend.NEVER_WAITS and not self.config.enforce_eager:
            self.graphs = CudaGraphs(self.model, self.kv_caches, *self.block_tables.shape)


def _find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not known: use 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return device
