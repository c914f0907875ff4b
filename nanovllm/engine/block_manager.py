"""Hands out the blocks of the KV cache and finds prefixes that are already in it. Knows ids, never tensors.

Every full block is known by a hash of its tokens and of the hash before it, since K/V depend on everything before. Equal hashes
promise equal prefixes, and since a promise is not a proof, tokens and parents are compared as well:

    tokens      | a b c d | e f g h | i j         block size 4; the last block is not full and has no hash
    hash        | h0=H(abcd) <- h1=H(h0, efgh)
    block_table |    7    |    2    |   5         logical block -> physical block

Two sequences that compute the same prefix at the same time make a duplicate. The cache lists one copy; both can have successors:

    A's block_table | 7 | 2 | 5 ...    block 2: hash h1, content 12, parent 11
    B's block_table | 7 | 4 | 9 ...    block 4: no hash, content 12: a duplicate of block 2
                                       block 9: hash h2, content 13, parent 12, found behind block 2 as well as behind block 4

A freed block keeps its content until somebody needs the space. `free_block_ids` is the eviction order: empty blocks first, then
the least recently used, of one sequence the tail before the head, because a tail without its head can never be hit.
(PagedAttention, Kwon et al. 2023; hash-chained prefix caching as in vLLM.)
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count

import xxhash

from nanovllm.engine.sequence import Sequence

_NO_CONTENT = 0  # the content id of an empty block, and the parent of a sequence's first block


@dataclass(eq=False, slots=True)
class Block:
    """One physical block. `hash` is -1 unless `hash_to_block_id` leads here.

    `content_id` names the prefix that ends with this block, `parent_id` the one that ends before it. Block ids could not name
    them, for blocks are reused: the parent's id may stand for another prefix by now. Content ids are never used twice.
    """

    block_id: int
    ref_count: int = 0
    hash: int = -1
    token_ids: list[int] = field(default_factory=list)
    content_id: int = _NO_CONTENT
    parent_id: int = _NO_CONTENT


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens. Everything costs O(1) per block concerned, whatever the pool's size."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """Forget everything: all blocks free, nothing cached."""
        self.blocks = [Block(block_id) for block_id in range(self.num_blocks)]
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))  # the next to be taken first
        self.hash_to_block_id: dict[int, int] = {}
        self.num_reusable = 0  # blocks that are free, but a prefix can still hit them
        self._content_ids = count(_NO_CONTENT + 1)

    @classmethod
    def compute_hash(cls, token_ids: list[int], prefix: int = -1) -> int:
        """xxh64 of a block's tokens, chained to the hash of the block before it (-1: there is none)."""
        parent = b"" if prefix == -1 else prefix.to_bytes(8, "little")
        return xxhash.xxh64_intdigest(parent + array("q", token_ids).tobytes())

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The longest chain of cached blocks that `seq` starts with; never its last token, whose logits are needed."""
        prefix, parent_id = list[Block](), _NO_CONTENT
        limit = 0 if seq.was_nan else (len(seq.token_ids) - 1) // self.block_size
        while len(prefix) < limit and (block := self._find(seq, len(prefix), parent_id)):
            prefix.append(block)
            parent_id = block.content_id
        return prefix

    def allocate(self, seq: Sequence, prefix: list[Block]) -> bool:
        """Give `seq` its block table: `prefix`, then fresh blocks for all its other tokens. False changes nothing."""
        num_fresh = -(-len(seq.token_ids) // self.block_size) - len(prefix)
        num_revived = sum(block.ref_count == 0 for block in prefix)
        if num_fresh + num_revived > len(self.free_block_ids):
            return False
        for block in prefix:  # before any fresh block is taken: that could evict one of these
            if block.ref_count == 0:
                del self.free_block_ids[block.block_id]
            block.ref_count += 1
        self.num_reusable -= num_revived
        seq.block_table = [block.block_id for block in prefix] + [self._take() for _ in range(num_fresh)]
        seq.num_computed_tokens = len(prefix) * self.block_size
        return True

    def grow(self, seq: Sequence, draft_len: int = 0) -> bool:
        """Make room for the token that `seq` gained last and for a draft behind it. False changes nothing."""
        num_missing = -(-(len(seq.token_ids) + draft_len) // self.block_size) - len(seq.block_table)
        if num_missing > len(self.free_block_ids):
            return False
        seq.block_table += [self._take() for _ in range(num_missing)]
        return True

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the blocks that become full when `seq` has `num_tokens` computed.

        Called when a step is planned, not when it is done: within a step K/V are written before they are read, so
        another sequence of the same step can already use them.
        """
        num_full = num_tokens // self.block_size if self.enable_prefix_caching else 0
        for index in range(seq.num_computed_tokens // self.block_size, num_full):
            block = self.blocks[seq.block_table[index]]
            parent_id = self.blocks[seq.block_table[index - 1]].content_id if index else _NO_CONTENT
            if original := self._find(seq, index, parent_id):
                block.content_id = original.content_id  # a duplicate
                continue
            hash_ = self._hash(seq, index)
            if hash_ in self.hash_to_block_id:  # a collision, or out of reach, since its parent was evicted: the newer one stays
                self.forget(self.hash_to_block_id[hash_])
            self.hash_to_block_id[hash_] = block.block_id
            block.hash, block.token_ids, block.parent_id = hash_, self._tokens(seq, index), parent_id
            block.content_id = next(self._content_ids)

    def free(self, seq: Sequence, num_tokens: int = 0) -> None:
        """Take back the blocks behind its first `num_tokens` tokens. What was cached can be hit until its block is taken."""
        seq.num_computed_tokens = num_tokens
        # A table that ends stays whole for those who have looked at it; the sequence's next one is another list.
        table = seq.block_table = seq.block_table if num_tokens else list(seq.block_table)
        while (index := len(table) - 1) * self.block_size >= num_tokens:  # the tail becomes the first to be evicted
            block = self.blocks[table.pop()]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_block_ids[block.block_id] = None
                self.free_block_ids.move_to_end(block.block_id, last=block.hash != -1)
                self.num_reusable += block.hash != -1
            # Using a duplicate also refreshes the cached copy: if that were evicted first, its successors could not be hit.
            if block.hash == -1 and block.content_id != _NO_CONTENT:
                original_id = self.hash_to_block_id.get(seq.block_hashes[index], -1)
                if original_id in self.free_block_ids and self.blocks[original_id].content_id == block.content_id:
                    self.free_block_ids.move_to_end(original_id)

    def _take(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        self.forget(block_id)
        self.blocks[block_id] = Block(block_id, ref_count=1)
        return block_id

    def forget(self, block_id: int) -> None:
        """Let nobody find that block any more. To the sequences that hold it, it still is the same content."""
        block = self.blocks[block_id]
        if block.hash != -1:
            del self.hash_to_block_id[block.hash]
            block.hash = -1
            self.num_reusable -= block.ref_count == 0

    def _find(self, seq: Sequence, index: int, parent_id: int) -> Block | None:
        """The cached block of the same tokens behind the same prefix as block `index` of `seq`."""
        block_id = self.hash_to_block_id.get(self._hash(seq, index))
        block = None if block_id is None else self.blocks[block_id]
        return block if block and block.parent_id == parent_id and block.token_ids == self._tokens(seq, index) else None

    def _tokens(self, seq: Sequence, index: int) -> list[int]:
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _hash(self, seq: Sequence, index: int) -> int:
        for i in range(len(seq.block_hashes), index + 1):
            seq.block_hashes.append(self.compute_hash(self._tokens(seq, i), seq.block_hashes[-1] if i else -1))
        return seq.block_hashes[index]
