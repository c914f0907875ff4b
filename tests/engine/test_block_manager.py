"""A block of the KV cache is shared only by equal prefixes, and overwritten only when it is free.

The examples show block tables as lists of physical blocks. A block holds two tokens, and a new pool
hands out blocks 0, 1, 2, ... in this order.
"""

from conftest import check_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE = 2


class Colliding(BlockManager):
    """A block manager in which every hash is 0 or 1."""

    @classmethod
    def compute_hash(cls, token_ids, prefix):
        return sum(token_ids) % 2


def make_sequence(*token_ids):
    return Sequence(0, token_ids, SamplingParams())


def compute(manager, seq):
    """Do what the scheduler does with all missing tokens of a step."""
    manager.cache_full_blocks(seq, seq.num_computed_tokens, len(seq.token_ids))
    seq.num_computed_tokens = len(seq.token_ids)


def admit(manager, seq):
    """Give a prompt its blocks and compute it. Return False if there are not enough blocks."""
    is_admitted = manager.allocate(seq, manager.find_prefix(seq))
    if is_admitted:
        compute(manager, seq)
    return is_admitted


def serve(manager, *token_ids):
    """Admit a prompt, and return its sequence."""
    seq = make_sequence(*token_ids)
    assert admit(manager, seq)
    return seq


def find_hits(manager, *token_ids):
    return [block.block_id for block in manager.find_prefix(make_sequence(*token_ids))]


# --- prefix caching


def test_salts_divide_the_cache():
    manager = BlockManager(10, BLOCK_SIZE)
    hashes = []
    for salt in (None, "a", "\ud800", "a"):
        seq = Sequence(0, [1, 2, 3], SamplingParams(cache_salt=salt))
        hashes.append(manager.hash_block(seq, 0))
    root = manager.compute_hash([ord("a")], manager.root_hash)
    assert hashes[:2] == [manager.compute_hash([1, 2], each) for each in (manager.root_hash, root)]
    assert len(set(hashes)) == 3
    assert hashes[3] == hashes[1]


def test_equal_prefixes_share_their_full_blocks():
    manager = BlockManager(10, BLOCK_SIZE)
    assert serve(manager, 1, 2, 3, 4, 5).block_table == [0, 1, 2]
    assert serve(manager, 1, 2, 3, 4, 6).block_table == [0, 1, 3]
    assert serve(manager, 1, 2, 7, 4, 5).block_table == [0, 4, 5]
    assert [block.ref_count for block in manager.blocks] == [3, 2, 1, 1, 1, 1, 0, 0, 0, 0]


def test_equal_tokens_after_another_prefix_are_no_hit():
    """K/V depend on all tokens before, so the hash of a block covers the hash before it."""
    manager = BlockManager(10, BLOCK_SIZE)
    serve(manager, 1, 2, 3, 4, 5)
    assert find_hits(manager, 3, 4, 3, 4, 5) == []


def test_the_last_token_is_never_a_hit():
    """The last token must be computed, because its logits choose the next one."""
    manager = BlockManager(10, BLOCK_SIZE)
    serve(manager, 1, 2, 3, 4)
    assert find_hits(manager, 1, 2, 3, 4) == [0]


def test_a_hash_collision_is_no_hit():
    manager = Colliding(10, BLOCK_SIZE)
    serve(manager, 1, 1, 0, 0, 5)
    assert find_hits(manager, 0, 2, 0, 0, 5) == []


def test_a_hash_depends_on_the_order_of_tokens_and_of_blocks():
    hashes = set()
    for first, second in (([1, 2], [3, 4]), ([3, 4], [1, 2]), ([2, 1], [3, 4]), ([1, 3], [2, 4])):
        prefix = BlockManager.compute_hash(first)
        hashes |= {prefix, BlockManager.compute_hash(second, prefix)}
    assert len(hashes) == 8


def test_each_engine_has_its_own_128_bit_hashes():
    """Otherwise a client could prepare collisions."""
    hashes = []
    for _ in range(2):
        manager = BlockManager(2, BLOCK_SIZE)
        serve(manager, 1, 1, 2)
        hashes += manager.hash_to_block_id
    assert hashes[0] != hashes[1]
    assert max(hashes) > 2**64
    assert BlockManager.compute_hash([1, 2]) == BlockManager.compute_hash([1, 2], -1)


def test_a_block_can_become_full_in_two_steps():
    manager = BlockManager(10, BLOCK_SIZE)
    seq = make_sequence(1, 2, 3)
    assert manager.allocate(seq, [])
    manager.cache_full_blocks(seq, 0, 1)
    assert find_hits(manager, 1, 2, 3) == []
    manager.cache_full_blocks(seq, 1, 2)
    assert find_hits(manager, 1, 2, 3) == [0]


# --- eviction


def test_eviction_is_least_recently_used_and_tail_first():
    manager = BlockManager(7, BLOCK_SIZE)
    old = serve(manager, 1, 1, 2, 2, 3, 3, 9)  # in blocks 0 to 3
    new = serve(manager, 4, 4, 5, 5, 9)  # in blocks 4 to 6
    manager.release(old, num_tokens=3)
    assert old.block_table == [0, 1]
    manager.release(old)
    assert old.block_table == []
    manager.release(new)
    # Blocks 6 and 3 are not full, so no prompt can hit them.
    assert list(manager.free_block_ids) == [6, 3, 2, 1, 0, 5, 4]
    again = serve(manager, 1, 1, 2, 2, 3, 3, 8)
    assert again.block_table == [0, 1, 2, 6]
    manager.release(again)
    assert list(manager.free_block_ids) == [6, 3, 5, 4, 2, 1, 0]


def test_blocks_are_in_use_or_reusable_or_empty():
    manager = BlockManager(5, BLOCK_SIZE)
    first = serve(manager, 1, 1, 2, 2, 3)
    assert manager.count_states() == {"used": 3, "reusable": 0, "empty": 2}
    manager.release(first)  # two full blocks stay cached
    assert manager.count_states() == {"used": 0, "reusable": 2, "empty": 3}
    serve(manager, 1, 1, 4)
    assert manager.count_states() == {"used": 2, "reusable": 1, "empty": 2}
    manager.uncache(1)
    manager.blocks.clear()  # counting visits no block, however many are free
    assert manager.count_states() == {"used": 2, "reusable": 0, "empty": 3}


# --- duplicates


def make_duplicates():
    """Two sequences compute the same first block at the same time. Block 0 is listed, 2 is not."""
    manager = BlockManager(6, BLOCK_SIZE)
    first = make_sequence(1, 1, 2)
    second = make_sequence(1, 1, 2, 2, 3)
    for seq in (first, second):
        assert manager.allocate(seq, [])
    for seq in (first, second):
        compute(manager, seq)
    assert first.block_table == [0, 1]
    assert second.block_table == [2, 3, 4]
    return manager, first, second


def test_a_successor_of_a_duplicate_can_be_hit():
    manager, _, _ = make_duplicates()
    assert find_hits(manager, 1, 1, 2, 2, 3) == [0, 3]


def test_a_listed_copy_is_evicted_after_the_successors_of_its_duplicate():
    manager, first, second = make_duplicates()
    manager.release(first)
    manager.release(second)
    assert list(manager.free_block_ids) == [2, 4, 1, 5, 3, 0]


def test_a_duplicate_is_cached_if_its_cached_copy_was_evicted():
    """Otherwise block 3, which stays cached, could not be hit."""
    manager, first, second = make_duplicates()
    manager.release(first)
    other = serve(manager, 7, 7, 7, 7, 7)  # takes block 0, the cached copy
    assert 0 in other.block_table
    assert find_hits(manager, 1, 1, 2, 2, 3) == []
    manager.release(second)
    assert find_hits(manager, 1, 1, 2, 2, 3) == [2, 3]
    assert list(manager.free_block_ids)[-2:] == [3, 2], "the tail is evicted before the head"


def test_an_error_caches_no_duplicate():
    manager, first, second = make_duplicates()
    manager.release(first)
    serve(manager, 7, 7, 7, 7, 7)
    manager.uncache_sequence(second)
    second.finish_reason = "error"
    manager.release(second)
    assert find_hits(manager, 1, 1, 2, 2, 3) == []


def test_a_block_that_was_uncached_because_of_an_error_is_no_duplicate():
    """Another sequence that shares it can be aborted before its own logits are NaN."""
    manager = BlockManager(6, BLOCK_SIZE)
    first = serve(manager, 1, 1, 2)
    second = serve(manager, 1, 1, 3)
    assert second.block_table[0] == first.block_table[0]
    manager.uncache_sequence(first)
    first.finish_reason = "error"
    manager.release(first)
    second.finish_reason = "abort"
    manager.release(second)
    assert find_hits(manager, 1, 1, 4) == []


# --- any order of calls


def check(manager, seqs):
    """Check that the pool, the reference counts and the prefix cache agree."""
    held = [block_id for seq in seqs for block_id in seq.block_table]
    free = list(manager.free_block_ids)
    assert sorted([*set(held), *free]) == list(range(manager.num_blocks))
    for block in manager.blocks:
        assert block.is_cached or block.token_ids == []
    check_blocks(manager, held)


TOKENS = st.integers(0, 1)


@given(
    data=st.data(),
    num_blocks=st.integers(1, 12),
    manager_class=st.sampled_from([BlockManager, Colliding]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_random_life(data, num_blocks, manager_class):
    """Hits hold the right tokens, failed calls change nothing, and the parts of a manager agree."""
    manager = manager_class(num_blocks, BLOCK_SIZE)
    live = []
    contents = {}  # block -> the prefix that ends with it
    for _ in range(data.draw(st.integers(1, 25))):
        before = repr({**vars(manager), "blocked": None})  # a failure is remembered there
        succeeds = True
        action = data.draw(st.sampled_from(["admit", "grow", "free"] if live else ["admit"]))
        if action == "admit":
            seq = make_sequence(*data.draw(st.lists(TOKENS, min_size=1, max_size=9)))
            for index, block in enumerate(manager.find_prefix(seq)):
                end = (index + 1) * BLOCK_SIZE
                # If hashes collide, only the block's own tokens are known to be equal.
                begin = end - BLOCK_SIZE if manager_class is Colliding else 0
                expected = seq.token_ids[begin:end]
                assert contents[block.block_id][-len(expected) :] == expected
            succeeds = admit(manager, seq)
            if succeeds:
                live.append(seq)
        else:
            seq = data.draw(st.sampled_from(live))
        if action == "grow":
            seq.token_ids.append(data.draw(TOKENS))
            succeeds = manager.grow(seq)
            if succeeds:
                compute(manager, seq)
            else:
                seq.token_ids.pop()
        if action == "free":
            manager.release(seq)
            live.remove(seq)
        assert succeeds or repr({**vars(manager), "blocked": None}) == before
        for seq in live:
            for index, block_id in enumerate(seq.block_table):
                contents[block_id] = seq.token_ids[: (index + 1) * BLOCK_SIZE]
        check(manager, live)


def test_a_released_part_of_a_block_leaves_no_hash():
    manager = BlockManager(8, BLOCK_SIZE)
    seq = serve(manager, 1, 2, 3)
    manager.release(seq)
    seq.num_computed_tokens = 2
    seq.token_ids += [4, 5]
    assert admit(manager, seq)
    assert len(find_hits(manager, 1, 2, 3, 4, 5)) == 2


def test_nothing_is_hit_without_prefix_caching():
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    serve(manager, 1, 2, 3)
    assert find_hits(manager, 1, 2, 3) == []


def test_what_did_not_fit_is_forgotten_when_it_fits():
    manager = BlockManager(3, BLOCK_SIZE)
    first = serve(manager, 1, 2, 3)
    blocked = make_sequence(4, 4, 4)
    assert not admit(manager, blocked)
    manager.release(first)
    assert manager.allocate(blocked, [])
    assert manager.blocked is None
