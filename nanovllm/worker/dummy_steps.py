"""Work before the first request: for self-tests, measurements, CUDA graphs and warm-up runs.

A batch is plain arrays, so it needs no sequences.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch.batch import Batch, make_batch
from nanovllm.batch.packing import copy_to
from nanovllm.layers.sampler import Sampler, make_sampling_batch
from nanovllm.models.decoder import CausalLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.helpers import cdiv
from nanovllm.worker.state_slots import FIRST_LANE, ZEROS
from nanovllm.worker.worker import Worker

SAMPLING_KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.5),
    # The most expensive kind comes last, so that its memory is on top of what the others keep.
    SamplingParams(top_p=0.5, repetition_penalty=2.0, min_tokens=1, logprobs=20),
]
_TEST_LEN = 33  # tokens of a context: two chunks of recurrent states, and a large tile of GEMMs


@torch.inference_mode()
def run_dummy_step(worker: Worker, query_lens: list[int]) -> Tensor:
    """Compute a step of whole prompts. Return its logits."""
    hidden = worker.compute(make_dummy_batch(worker, query_lens))
    return worker.model.compute_logits(hidden)


def make_dummy_batch(worker: Worker, query_lens: list[int]) -> Batch:
    """Make a batch of whole prompts in block 0.

    Kernels are launched for contexts of max_model_len.
    """
    width = worker.block_table_width
    block_tables = np.zeros((len(query_lens), width), np.int32)
    # Captured steps have id 0, so a replay that does not read its input is noticed.
    ids = [1] * sum(query_lens)
    batch = make_batch(query_lens, query_lens, block_tables, worker.block_size, ids)
    has_windows = worker.plan.num_window_blocks > 0
    return replace(
        batch,
        # Never written, so a repeated step reads the same state.
        read_slots=np.full_like(batch.read_slots, ZEROS),
        # Not slot 0, which the padding of a CUDA graph writes.
        write_slots=np.full_like(batch.write_slots, FIRST_LANE),
        # Both pools have a block 0.
        window_slots=batch.slot_mapping if has_windows else batch.window_slots,
        window_tables=batch.block_tables if has_windows else batch.window_tables,
        max_seqlen_k=worker.max_model_len,
    )


def find_largest_step(worker: Worker) -> list[int]:
    """The query lengths of a step that needs as much memory as any step can.

    With at most 4 sequences of at most 5 tokens each in a step of 10, these are 5, 3, 1 and 1.
    """
    query_lens = []
    num_left = worker.config.max_num_batched_tokens
    for num_others in reversed(range(worker.max_num_logits)):  # each gets one token at least
        query_len = min(worker.max_model_len, num_left - num_others)
        query_lens.append(query_len)
        num_left -= query_len
    return query_lens


def run_test_steps(worker: Worker, model: CausalLM) -> None:
    """Compute a prompt beside a decode, then two decodes, and then one, for self-tests.

    The steps have caches of their own, with random K/V and states. Each sequence has blocks and a
    state slot. Later steps have other tokens, because equal ones would write nearly equal K/V,
    and a layer that writes nothing would not be noticed.
    """
    length = min(_TEST_LEN, worker.max_model_len)  # tokens of each context
    num_blocks = 2 * cdiv(length, worker.block_size)
    caches = worker.make_caches(worker.device, num_blocks, num_state_slots=2)
    random = torch.Generator(worker.device).manual_seed(0)
    for cache in caches:
        cache.normal_(generator=random)
    block_tables = np.arange(num_blocks, dtype=np.int32).reshape(2, -1)
    for first_id, query_lens in ((0, [length, 1]), (7, [1, 1]), (9, [1])):
        num_seqs = len(query_lens)
        batch = make_batch(
            query_lens,
            [length] * num_seqs,
            block_tables[:num_seqs],
            worker.block_size,
            [(first_id + i) % worker.spec.vocab_size for i in range(sum(query_lens))],
            state_slots=np.arange(num_seqs, dtype=np.int32),
        )
        model(copy_to(batch, worker.device), caches)


def sample_test_rows(sampler: Sampler, dtype: torch.dtype) -> None:
    """Sample rows of random logits in each way, for the self-test of the sampler."""
    # Not the greedy kind, because 16-bit logits can be equal.
    kinds = SAMPLING_KINDS[1:] * 8
    # The fields of a row that make_sampling_batch reads.
    rows: list[Any] = [SimpleNamespace(params=params, seed=0) for params in kinds]
    hashes = sampler.token_hashes
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(rows), len(hashes), device="cpu", generator=random)
    batch = make_sampling_batch(rows, [*range(len(rows))], len(hashes), hashes.device)
    sampler(logits.to(hashes.device, dtype), batch)
