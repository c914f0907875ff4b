"""Allocates the blocks of the KV cache and finds cached prefixes. Uses ids, not tensors.

The K/V of a token depend on all tokens before it. A full block is therefore identified by a
chained hash, which covers its own tokens and the hash of the block before it:

    tokens      | a b c d | e f g h | i j         block size 4; the last block is not full
    hash        | h0=H(root, abcd) <- h1=H(h0, efgh)
    block_table |    7    |    2    |   5         logical block -> physical block

A cached block is a full block that is listed in `hash_to_block_id`, so other sequences can hit it.
A block with the same content as a cached one is an uncached duplicate. Two sequences can compute it
at the same time, or a hit can end before it. If its cached copy was evicted when its sequence
releases it, the duplicate is cached itself.

A freed block keeps its content until it is taken for other tokens. `free_block_ids` is the
eviction order: uncached blocks first, then the least recently used ones. Within a sequence the tail
is evicted before the head, because a tail without its head cannot be hit.

References: PagedAttention (Kwon et al. 2023); vLLM's automatic prefix caching.
"""

import secrets
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

import xxhash

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.helpers import cdiv


@dataclass(eq=False, slots=True)
class Block:
    """One physical block. `hash` is -1 and `token_ids` is empty unless the block is cached."""

    block_id: int
    ref_count: int = 0
    hash: int = -1
    token_ids: list[int] = field(default_factory=list)
    is_duplicate: bool = False

    @property
    def is_cached(self) -> bool:
        return self.hash != -1


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens.

    Except for `reset`, an operation costs time in proportion to the blocks and tokens that it
    concerns, whatever the size of the pool.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        # The start of every chain is secret, so that clients cannot prepare hash collisions.
        self.root_hash = secrets.randbits(128)
        self.reset()

    def reset(self) -> None:
        """Free all blocks and empty the prefix cache."""
        self.blocks = [Block(block_id) for block_id in range(self.num_blocks)]
        self.free_block_ids = OrderedDict[int, None].fromkeys(range(self.num_blocks))
        self.hash_to_block_id: dict[int, int] = {}
        self.num_reusable = 0  # free blocks that are cached
        # The newest sequence that did not fit, the free blocks that it needs, and its hashes.
        self.blocked: tuple[Sequence, int, set[int]] | None = None

    @classmethod
    def compute_hash(cls, token_ids: list[int], prefix: int = -1) -> int:
        """Hash a block's tokens, chained to the 128-bit hash of the block before it.

        The chain of an engine starts at its root_hash. The prefix is hashed as data, so that all
        its bits count. It is also the seed, because xxh3 has known collisions for a known seed.
        Prefix -1 is none.
        """
        prefix_bytes = (prefix % 2**128).to_bytes(16, "little")
        data = prefix_bytes + array("i", token_ids).tobytes()
        return xxhash.xxh3_128_intdigest(data, seed=prefix % 2**64)

    def count_states(self) -> dict[str, int]:
        """Count the blocks in use, the free ones that are cached, and the others."""
        num_free = len(self.free_block_ids)
        num_empty = num_free - self.num_reusable
        num_used = self.num_blocks - num_free
        return {"used": num_used, "reusable": self.num_reusable, "empty": num_empty}

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """Find the longest chain of cached blocks at the start of `seq`.

        The chain ends before the last token, whose logits are needed.
        """
        prefix: list[Block] = []
        for index in range((len(seq.token_ids) - 1) // self.block_size):
            block = self.find_block(seq, index)
            if block is None:
                break
            prefix.append(block)
        return prefix

    def find_block(self, seq: Sequence, index: int) -> Block | None:
        """Find the cached block with the K/V of block `index` of `seq`, if there is one."""
        block_id = self.hash_to_block_id.get(self.hash_block(seq, index))
        if block_id is None or self.blocks[block_id].token_ids != self.get_tokens(seq, index):
            return None  # a miss, or a hash collision
        return self.blocks[block_id]

    def allocate(self, seq: Sequence, prefix: list[Block]) -> bool:
        """Build the block table: `prefix`, then new blocks for all other tokens.

        Return False if there are not enough free blocks. Only the failure is recorded then.
        """
        num_new = cdiv(len(seq.token_ids), self.block_size) - len(prefix)
        num_needed = num_new + len([block for block in prefix if block.ref_count == 0])
        if num_needed > len(self.free_block_ids):
            self.blocked = (seq, num_needed, set(seq.block_hashes))
            return False
        self.blocked = None
        for block in prefix:  # before new blocks are taken, which could evict one of these
            self.share(block)
        seq.block_table = [block.block_id for block in prefix]
        return self.grow(seq)  # there are enough free blocks

    def is_still_blocked(self, seq: Sequence) -> bool:
        """Return whether `allocate` failed for `seq` and would fail again, without a new search.

        Searching a long prompt in every step would take longer than the rest of scheduling. A
        sequence needs fewer free blocks only after a running sequence has cached a block of its
        prefix, or left a snapshot there. Both forget the failure.
        """
        if self.blocked is None:
            return False
        blocked_seq, num_needed, _ = self.blocked
        return blocked_seq is seq and len(self.free_block_ids) < num_needed

    def grow(self, seq: Sequence) -> bool:
        """Extend the block table to all tokens. Return False, and change nothing, if it cannot."""
        num_new = cdiv(len(seq.token_ids), self.block_size) - len(seq.block_table)
        if num_new > len(self.free_block_ids):
            return False
        seq.block_table += [self.take() for _ in range(num_new)]
        return True

    def share(self, block: Block) -> None:
        """Add a cached block, which may be free, to one more block table."""
        if block.ref_count == 0:
            del self.free_block_ids[block.block_id]
            self.num_reusable -= 1
        block.ref_count += 1

    def take(self) -> int:
        """Take the first free block for one block table, and evict its content."""
        block_id, _ = self.free_block_ids.popitem(last=False)
        self.uncache(block_id)
        self.blocks[block_id].ref_count = 1
        self.blocks[block_id].is_duplicate = False
        return block_id

    def cache_full_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """Cache the blocks of `seq` that its tokens from position `start` to `end` make full.

        The scheduler calls this before the K/V are written. That is safe because every layer writes
        K/V before it attends, so another sequence of the same step may already share the blocks. It
        is called again for tokens that are known later.
        """
        for index in range(start // self.block_size, end // self.block_size):
            self.cache_block(seq, index, seq.block_table[index])

    def cache_block(self, seq: Sequence, index: int, block_id: int) -> None:
        """Let other sequences find the block that has the K/V of block `index` of `seq`.

        If its hash is in the cache already, the block stays an uncached duplicate.
        """
        if not self.enable_prefix_caching:
            return
        block_hash = self.hash_block(seq, index)
        block = self.blocks[block_id]
        block.is_duplicate = self.hash_to_block_id.get(block_hash, block_id) != block_id
        if block_hash in self.hash_to_block_id:
            return
        block.hash = block_hash
        block.token_ids = self.get_tokens(seq, index)
        self.hash_to_block_id[block_hash] = block_id
        if self.blocked is not None and block_hash in self.blocked[2]:
            self.blocked = None  # its sequence may fit now

    def uncache(self, block_id: int) -> None:
        """Remove a block from the prefix cache. Sequences that hold the block keep it."""
        block = self.blocks[block_id]
        if block.is_cached:
            del self.hash_to_block_id[block.hash]
            block.hash = -1
            block.token_ids = []
            if block.ref_count == 0:
                self.num_reusable -= 1

    def uncache_sequence(self, seq: Sequence) -> None:
        """Remove all blocks with K/V of `seq` from the prefix cache, also those it has released."""
        for block_hash in seq.block_hashes:
            block_id = self.hash_to_block_id.get(block_hash)
            if block_id is not None:
                self.uncache(block_id)

    def release(self, seq: Sequence, num_tokens: int = 0) -> None:
        """Release the blocks of `seq`, except those of its first `num_tokens` tokens.

        block_table | kept | kept | evicted second | evicted first |
                    `- num_tokens -'
        """
        num_kept = cdiv(num_tokens, self.block_size)
        for index in reversed(range(num_kept, len(seq.block_table))):
            self.release_block(seq, index, seq.block_table[index])
        seq.block_table = seq.block_table[:num_kept]

    def release_block(self, seq: Sequence, index: int, block_id: int) -> None:
        """Remove block `index` of `seq` from one block table."""
        block = self.blocks[block_id]
        is_known = (index + 1) * self.block_size <= len(seq.token_ids)
        if block.is_duplicate and is_known and seq.finish_reason != "error":
            # If its cached copy was evicted, the blocks behind it could not be hit without it.
            self.cache_block(seq, index, block_id)
        block.ref_count -= 1
        if block.ref_count == 0:
            # A cached block is the last to be taken, and an uncached block the first.
            self.free_block_ids[block_id] = None
            self.free_block_ids.move_to_end(block_id, last=block.is_cached)
            if block.is_cached:
                self.num_reusable += 1
        if not block.is_cached and index < len(seq.block_hashes):
            # A duplicate. Its cached copy must not be evicted before the copy's successors, because
            # these could not be hit then.
            cached_id = self.hash_to_block_id.get(seq.block_hashes[index])
            if cached_id is not None and cached_id in self.free_block_ids:
                self.free_block_ids.move_to_end(cached_id)

    def find_root(self, cache_salt: str | None) -> int:
        """Return where the chain of sequences with this salt starts."""
        if cache_salt is None:
            return self.root_hash
        salt = cache_salt.encode("utf-8", "surrogatepass")  # JSON can hold lone surrogates
        return self.compute_hash(list(salt), self.root_hash)

    def get_tokens(self, seq: Sequence, index: int) -> list[int]:
        start = index * self.block_size
        return seq.token_ids[start : start + self.block_size]

    def hash_block(self, seq: Sequence, index: int) -> int:
        """Return the chained hash of a full block of `seq`, and keep it in `block_hashes`."""
        hashes = seq.block_hashes
        while len(hashes) <= index:
            prefix = hashes[-1] if hashes else self.find_root(seq.params.cache_salt)
            hashes.append(self.compute_hash(self.get_tokens(seq, len(hashes)), prefix))
        return hashes[index]
