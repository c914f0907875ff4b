"""The dummy batches at the start of an engine: for self-tests, the profile run and warm-up runs.

A batch is plain tensors, so it needs no sequences.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from nanovllm.batch import Batch
from nanovllm.utils.arithmetic import cdiv
from nanovllm.worker.state_slots import ZEROS

_TEST_LEN = 33  # tokens of a context: two chunks of recurrent states, and a large tile of GEMMs


def make_dummy_batch(query_lens: list[int], block_table_width: int, max_seqlen_k: int) -> Batch:
    """A batch of whole prompts in block 0. Kernels are launched for contexts of max_seqlen_k."""
    num_tokens = sum(query_lens)
    num_seqs = len(query_lens)
    with torch.device("cpu"):
        context_lens = torch.tensor(query_lens, dtype=torch.int32)
        cu_seqlens_q = torch.zeros(num_seqs + 1, dtype=torch.int32)
        cu_seqlens_q[1:] = context_lens.cumsum(0)
        zeros = torch.zeros(num_tokens, dtype=torch.int32)
        block_tables = torch.zeros(num_seqs, block_table_width, dtype=torch.int32)
        slots = torch.zeros(num_seqs, dtype=torch.int32)
    return Batch(
        # Captured steps have 0, so a replay that does not read its input is noticed.
        input_ids=torch.ones_like(zeros),
        positions=zeros,
        slot_mapping=zeros,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        block_tables=block_tables,
        logits_indices=cu_seqlens_q[1:] - 1,
        read_slots=slots + ZEROS,  # never written, so a repeated step reads the same state
        write_slots=slots,
        prefills=(context_lens > 1).nonzero().flatten().int(),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max_seqlen_k,
    )


def find_largest_step(num_seqs: int, max_num_tokens: int, max_model_len: int) -> list[int]:
    """The query lengths of a step that needs as much memory as any step can.

    Its sequences have as many tokens as they can have in one step.
    """
    query_lens: list[int] = []
    num_left = max_num_tokens
    for num_others in reversed(range(num_seqs)):  # each gets one token at least
        query_len = min(max_model_len, num_left - num_others)
        query_lens.append(query_len)
        num_left -= query_len
    return query_lens


def make_test_batches(block_size: int, vocab_size: int, max_model_len: int) -> Iterator[Batch]:
    """A prompt beside a decode, and then two decodes. Each sequence has blocks and a slot."""
    length = min(_TEST_LEN, max_model_len)  # tokens of each context
    num_blocks = cdiv(length, block_size)  # for each sequence
    with torch.device("cpu"):
        order = torch.arange(max(length, 2 * num_blocks), dtype=torch.int32)
    seqs = order[:2]
    for query_len in (length, 1):
        positions = torch.cat((order[length - query_len : length], order[length - 1 : length]))
        slots = positions.clone()
        slots[-1] += num_blocks * block_size
        yield replace(
            make_dummy_batch([query_len, 1], num_blocks, max_model_len),
            input_ids=positions % vocab_size,
            positions=positions,
            slot_mapping=slots,
            context_lens=torch.full_like(seqs, length),
            block_tables=order[: 2 * num_blocks].view(2, -1),
            read_slots=seqs,
            write_slots=seqs,
        )
