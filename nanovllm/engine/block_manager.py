"""Hands out the blocks of the KV cache and finds prefixes that are already in it. Knows ids, never tensors.

Every full block is known by a hash of its tokens and of the hash before it. Equal hashes promise equal prefixes, and
since a promise is not a proof, tokens and parents are compared as well:

    tokens      | a b c d | e f g h | i j         block size 4; the last block is not full and has no hash
    hash        | h0=H(abcd) <- h1=H(h0, efgh)
    block_table |    7    |    2    |   5         logical block -> physical block

A freed block keeps its content until somebody needs the space. `free_block_ids` is the eviction order: blocks without
content first, then the least recently used ones, of one sequence the tail before the head, because a tail without its
head can never be hit. (PagedAttention, Kwon et al. 2023; hash-chained prefix caching as in vLLM.)
"""

from array import array
from collections import OrderedDict
from itertools import count

import xxhash

from nanovllm.engine.sequence import Sequence

_NO_CONTENT = 0  # content id of nothing: the parent of a sequence's first block


class Block:
    """One physical block. `hash` is -1 unless `hash_to_block_id` leads here.

    `content_id` names the prefix that ends with this block, `parent_id` the one that ends before it. Ids are never used
    twice, so a chain of them cannot be forged by a hash collision.
    """

    __slots__ = ("block_id", "ref_count", "hash", "token_ids", "content_id", "parent_id")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.clear()

    def clear(self) -> None:
        self.hash = -1
        self.token_ids: list[int] = []
        self.content_id = self.parent_id = _NO_CONTENT


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens. Everything costs O(1) per block concerned, whatever the pool's size."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """Forget everything: all blocks free, nothing cached."""
        self.blocks = [Block(block_id) for block_id in range(self.num_blocks)]
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self.hash_to_block_id: dict[int, int] = {}
        self.num_reusable = 0  # reusable: free, but a prefix can still hit it
        self._num_freed = 0  # blocks that have become free, since the start
        self._refused: tuple[Sequence | None, int, int | None] = None, 0, None  # see is_refused_still
        self._content_ids = count(_NO_CONTENT + 1)

    @classmethod
    def compute_hash(cls, token_ids: list[int], prefix: int = -1) -> int:
        """xxh64 of a block's tokens, chained to the hash of the block before it (-1: there is none)."""
        parent = b"" if prefix == -1 else prefix.to_bytes(8, "little")
        return xxhash.xxh64_intdigest(parent + array("q", token_ids).tobytes())

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The longest chain of cached blocks that `seq` starts with; never its last token, whose logits are needed."""
        prefix: list[Block] = []
        if self.enable_prefix_caching and seq.may_hit:
            parent_id = _NO_CONTENT
            for index in range((len(seq.token_ids) - 1) // self.block_size):
                block = self._lookup(self._hash(seq, index), self._tokens(seq, index), parent_id)
                if block is None:
                    break
                prefix.append(block)
                parent_id = block.content_id
        return prefix

    def is_refused_still(self, seq: Sequence) -> bool:
        """True if `seq` was refused last and nothing has happened since that could change it: its prefix need not be looked up.

        Every block that becomes free makes up for one that was missing, and so does every one that prolongs the prefix.
        """
        refused, num_freed_wanted, next_hash = self._refused
        return refused is seq and self._num_freed < num_freed_wanted and next_hash not in self.hash_to_block_id

    def allocate(self, seq: Sequence, prefix: list[Block]) -> bool:
        """Give `seq` its block table: `prefix`, then fresh blocks for all its other tokens. False changes nothing."""
        num_fresh = -(-len(seq.token_ids) // self.block_size) - len(prefix)
        num_revived = sum(block.ref_count == 0 for block in prefix)
        num_missing = num_fresh + num_revived - len(self.free_block_ids)
        if num_missing > 0:
            is_whole = len(prefix) == (len(seq.token_ids) - 1) // self.block_size
            next_hash = None if is_whole else self._hash(seq, len(prefix))
            self._refused = (seq, self._num_freed + num_missing, next_hash)
            return False
        self._refused = None, 0, None
        for block in prefix:  # before any fresh block is taken: that could evict one of these
            if block.ref_count == 0:
                del self.free_block_ids[block.block_id]
                self.num_reusable -= 1
            block.ref_count += 1
        seq.block_table = [block.block_id for block in prefix] + [self._take() for _ in range(num_fresh)]
        seq.num_computed_tokens = len(prefix) * self.block_size
        return True

    def grow(self, seq: Sequence) -> bool:
        """Make room for the token that `seq` gained last. False changes nothing."""
        if len(seq.token_ids) > len(seq.block_table) * self.block_size:
            if not self.free_block_ids:
                return False
            seq.block_table.append(self._take())
        return True

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the blocks that become full when `seq` has `num_tokens` computed.

        Called when a step is planned, not when it is done: within a step K/V are written before they are read, so
        another sequence of the same step can already use them.
        """
        if not self.enable_prefix_caching:
            return
        for index in range(seq.num_computed_tokens // self.block_size, num_tokens // self.block_size):
            block = self.blocks[seq.block_table[index]]
            parent_id = self.blocks[seq.block_table[index - 1]].content_id if index else _NO_CONTENT
            hash_, token_ids = self._hash(seq, index), self._tokens(seq, index)
            if twin := self._lookup(hash_, token_ids, parent_id):
                block.content_id = twin.content_id  # computed twice: one is found, both can be a parent
                continue
            if hash_ in self.hash_to_block_id:  # a collision, or what is left of an evicted parent: the newer one stays
                displaced = self.blocks[self.hash_to_block_id[hash_]]
                displaced.hash = -1
                self.num_reusable -= displaced.ref_count == 0
            self.hash_to_block_id[hash_] = block.block_id
            block.hash, block.token_ids = hash_, token_ids
            block.content_id, block.parent_id = next(self._content_ids), parent_id

    def forget(self, seq: Sequence) -> None:
        """Let nobody find the blocks of `seq` any more: what is in them cannot be trusted."""
        for block_id in seq.block_table:
            block = self.blocks[block_id]
            if block.hash != -1:
                del self.hash_to_block_id[block.hash]
                block.hash = -1

    def free(self, seq: Sequence) -> None:
        """Take the block table back. What was cached stays findable until its block is taken."""
        for index in reversed(range(len(seq.block_table))):  # the tail becomes the first to be evicted
            block = self.blocks[seq.block_table[index]]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_block_ids[block.block_id] = None
                self._num_freed += 1
                if block.hash != -1:
                    self.num_reusable += 1
                else:
                    self.free_block_ids.move_to_end(block.block_id, last=False)
            if block.hash == -1 and block.content_id != _NO_CONTENT:
                self._touch_twin(seq.block_hashes[index], block.content_id)
        seq.block_table = []
        seq.num_computed_tokens = 0

    def _touch_twin(self, hash_: int, content_id: int) -> None:
        """Use of a block that was computed twice is use of the twin that can be found: its tails must not outlive it."""
        block_id = self.hash_to_block_id.get(hash_, -1)
        if block_id in self.free_block_ids and self.blocks[block_id].content_id == content_id:
            self.free_block_ids.move_to_end(block_id)

    def _take(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        if block.hash != -1:
            del self.hash_to_block_id[block.hash]
            self.num_reusable -= 1
        block.clear()
        block.ref_count = 1
        return block_id

    def _lookup(self, hash_: int, token_ids: list[int], parent_id: int) -> Block | None:
        block_id = self.hash_to_block_id.get(hash_)
        if block_id is None:
            return None
        block = self.blocks[block_id]
        return block if block.parent_id == parent_id and block.token_ids == token_ids else None

    def _tokens(self, seq: Sequence, index: int) -> list[int]:
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _hash(self, seq: Sequence, index: int) -> int:
        hashes = seq.block_hashes
        for i in range(len(hashes), index + 1):
            hashes.append(self.compute_hash(self._tokens(seq, i), hashes[-1] if hashes else -1))
        return hashes[index]
