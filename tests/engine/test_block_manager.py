"""A block of the KV cache is shared only by equal prefixes, and overwritten only when it is free.

The examples show block tables as lists of physical blocks. A block holds two tokens, and a new pool
hands out blocks 0, 1, 2, ... in this order.
"""

from functools import partial
from itertools import takewhile

import pytest
import xxhash
from conftest import check_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.helpers import cdiv

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


def admit(manager, seq, prefix=None):
    """Give a prompt its blocks and compute it. Return False if there are not enough blocks."""
    is_admitted = manager.allocate(seq, manager.find_prefix(seq) if prefix is None else prefix)
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


# U+0141 ends with the byte of "A". Lone surrogates have no code in UTF-8.
SALTS = (None, "", "?", "a", "A", "\u0141", "\ud800", "\ud801", "a\ud800")


def test_salts_divide_the_cache():
    manager = BlockManager(10, BLOCK_SIZE)
    hashes = []
    for salt in (*SALTS, "a"):
        seq = Sequence(0, [1, 2, 3], SamplingParams(cache_salt=salt))
        hashes.append(manager.hash_block(seq, 0))
    root = manager.compute_hash([ord("a")], manager.root_hash)
    assert hashes[0] == manager.compute_hash([1, 2], manager.root_hash)
    assert hashes[SALTS.index("a")] == hashes[-1] == manager.compute_hash([1, 2], root)
    assert len(set(hashes)) == len(SALTS)


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


def test_all_bits_of_tokens_and_of_the_prefix_count(monkeypatch):
    hashes = [BlockManager.compute_hash([token], prefix=5) for token in (1, 1 + 2**8, 1 + 2**16)]
    hashes += [BlockManager.compute_hash([1], prefix=5 + 2**bit) for bit in (64, 100)]
    hashes += [BlockManager.compute_hash(token_ids) for token_ids in ([1, 23], [12, 3])]
    assert len(set(hashes)) == 7
    seeds = set()

    def note_seed(compute, data, seed=0):
        seeds.add(seed)
        return compute(data, seed=seed)

    for name in ("xxh3_128_intdigest", "xxh128_intdigest", "xxh3_128", "xxh128"):
        monkeypatch.setattr(xxhash, name, partial(note_seed, getattr(xxhash, name)))
    for prefix in (5, 6):
        BlockManager.compute_hash([1], prefix)
    assert len(seeds) == 2, "xxh3 has known collisions for a known seed"


def test_a_far_block_can_be_asked_for_first():
    manager = BlockManager(2, block_size=1)
    far, near = make_sequence(*range(3000)), make_sequence(*range(3000))
    assert manager.hash_block(far, 2999) == far.block_hashes[-1]
    for index in range(3000):
        manager.hash_block(near, index)
    manager.hash_block(far, 0)
    assert far.block_hashes == near.block_hashes


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8])
def test_a_block_is_cached_by_the_step_that_fills_it(num_tokens):
    """Whether its tokens come from the prompt or are generated, in chunks of `num_tokens`."""
    manager = BlockManager(10, block_size=4)
    seq = make_sequence(1, 2)
    seq.token_ids += range(3, 18)
    assert manager.allocate(seq, [])
    for start in range(0, 17, num_tokens):
        end = min(17, start + num_tokens)
        manager.cache_full_blocks(seq, start, end)
        assert len(find_hits(manager, *range(1, 19))) == end // 4


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
    manager, first, _ = make_duplicates()
    assert find_hits(manager, 1, 1, 2, 2, 3) == [0, 3]
    manager.release(first)
    assert find_hits(manager, 1, 1, 2, 2, 3) == [0, 3], "of a free block and one in use"


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


def test_all_cached_copies_are_evicted_after_the_successors_of_their_duplicates():
    manager = BlockManager(8, BLOCK_SIZE)
    seqs = [make_sequence(1, 1, 2, 2), make_sequence(1, 1, 2, 2, 3, 3, 4)]
    for seq in seqs:
        assert manager.allocate(seq, [])
    for seq in seqs:
        compute(manager, seq)
    for seq in seqs:
        manager.release(seq)
    assert list(manager.free_block_ids)[-3:] == [4, 1, 0]


@pytest.mark.parametrize("reason", [None, "length", "abort"])
def test_a_duplicate_becomes_the_cached_copy_at_any_end(reason):
    manager, first, second = make_duplicates()
    manager.release(first)
    serve(manager, 7, 7, 7, 7, 7)
    second.finish_reason = reason
    manager.release(second)
    assert find_hits(manager, 1, 1, 2, 2, 3) == [2, 3]


def test_a_duplicate_that_has_lost_a_token_is_not_cached():
    """A stop token within an accepted draft can take the tokens after it."""
    manager = BlockManager(6, BLOCK_SIZE)
    first = make_sequence(1, 1, 2)
    second = make_sequence(1, 1)
    for seq in (first, second):
        assert manager.allocate(seq, [])
    for seq in (first, second):
        compute(manager, seq)
    manager.uncache(first.block_table[0])
    second.token_ids.pop()
    manager.release(second)
    assert manager.hash_to_block_id == {}


def test_a_released_tail_is_cached_by_its_own_tokens():
    manager = BlockManager(6, BLOCK_SIZE)
    seqs = [make_sequence(1, 1, 2, 2), make_sequence(1, 1, 2, 2)]
    for seq in seqs:
        assert manager.allocate(seq, [])
    for seq in seqs:
        compute(manager, seq)
    manager.release(seqs[0])
    assert len(serve(manager, *[7] * 8).block_table) == 4  # among them both cached copies
    manager.release(seqs[1], num_tokens=2)
    assert manager.blocks[3].token_ids == [2, 2]


def test_a_block_that_an_error_has_uncached_is_followed_by_its_new_copy():
    """The blocks behind it can be hit through the copy, which is therefore evicted last."""
    manager = BlockManager(8, BLOCK_SIZE)
    first = serve(manager, 1, 1, 5)
    second = serve(manager, 1, 1, 2, 2, 3)
    manager.uncache_sequence(first)
    first.finish_reason = "error"
    manager.release(first)
    copy = serve(manager, 1, 1, 9)
    expected = [second.block_table[1], copy.block_table[0]]
    manager.release(copy)
    manager.release(second)
    assert list(manager.free_block_ids)[-2:] == expected


def test_a_block_that_is_taken_is_no_duplicate_any_more():
    manager, _, second = make_duplicates()
    manager.release(second)
    for token_id in (8, 9):  # both are aborted before they are computed
        seq = make_sequence(token_id, token_id, token_id)
        assert manager.allocate(seq, [])
        assert 2 in seq.block_table or token_id == 9
        seq.finish_reason = "abort"
        manager.release(seq)
        assert find_hits(manager, token_id, token_id, token_id) == []


def test_an_error_caches_no_duplicate():
    manager, first, second = make_duplicates()
    manager.release(first)
    serve(manager, 7, 7, 7, 7, 7)
    manager.uncache_sequence(second)
    second.finish_reason = "error"
    manager.release(second)
    assert find_hits(manager, 1, 1, 2, 2, 3) == []


def test_an_error_uncaches_what_a_sequence_has_released():
    manager = BlockManager(8, BLOCK_SIZE)
    seq = serve(manager, 1, 1, 2, 2, 3, 3)
    assert manager.find_block(seq, 0)
    manager.release(seq)
    manager.uncache_sequence(seq)
    assert manager.hash_to_block_id == {}


@pytest.mark.parametrize("was_duplicate", [False, True])
def test_a_block_that_was_uncached_because_of_an_error_is_no_duplicate(was_duplicate):
    """Another sequence that shares it can be aborted before its own logits are NaN."""
    manager, first, second = make_duplicates()
    manager.release(first)
    if was_duplicate:  # block 2 becomes the cached copy
        manager.release(serve(manager, 7, 7, 7, 7, 7))
    manager.release(second)
    seqs = [make_sequence(1, 1, 5), make_sequence(1, 1, 6)]
    for seq in seqs:
        prefix = manager.find_prefix(seq)
        assert [block.block_id for block in prefix] == [2 if was_duplicate else 0]
        assert manager.allocate(seq, prefix)
        seq.num_computed_tokens = BLOCK_SIZE
        compute(manager, seq)
    manager.uncache_sequence(seqs[0])
    for seq, reason in zip(seqs, ("error", "abort")):
        seq.finish_reason = reason
        manager.release(seq)
    assert find_hits(manager, 1, 1, 4) == []


# --- any order of calls


def check(manager, seqs):
    """Check that the pool, the reference counts and the prefix cache agree."""
    held = [block_id for seq in seqs for block_id in seq.block_table]
    free = list(manager.free_block_ids)
    assert sorted([*set(held), *free]) == list(range(manager.num_blocks))
    for block in manager.blocks:
        assert len(block.token_ids) == (BLOCK_SIZE if block.is_cached else 0)
        assert not (block.is_cached and block.is_duplicate)
    check_blocks(manager, held)


def count_hits(manager, contents, token_ids):
    """How many blocks of a prompt are cached, by what they contain, up to the first that is not."""
    cached = [contents[block.block_id] for block in manager.blocks if block.is_cached]
    ends = range(BLOCK_SIZE, len(token_ids), BLOCK_SIZE)
    return len(list(takewhile(lambda end: token_ids[:end] in cached, ends)))


TOKENS = st.integers(0, 1)


@given(
    data=st.data(),
    num_blocks=st.integers(1, 12),
    manager_class=st.sampled_from([BlockManager, Colliding]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_random_life(data, num_blocks, manager_class):
    """Hits hold the right tokens and are all there are, and calls fail only if they must.

    Failed calls change nothing, and the parts of a manager agree.
    """
    manager = manager_class(num_blocks, BLOCK_SIZE)
    live = []
    contents = {}  # block -> the prefix that ends with it
    for _ in range(data.draw(st.integers(1, 25))):
        before = repr({**vars(manager), "blocked": None})  # a failure is remembered there
        succeeds = True
        written = []  # blocks
        actions = ["admit", "grow", "free", "error"]
        action = data.draw(st.sampled_from(actions if live else ["admit"]))
        if action == "admit":
            seq = make_sequence(*data.draw(st.lists(TOKENS, min_size=1, max_size=9)))
            prefix = manager.find_prefix(seq)
            for index, block in enumerate(prefix):
                end = (index + 1) * BLOCK_SIZE
                # If hashes collide, only the block's own tokens are known to be equal.
                begin = end - BLOCK_SIZE if manager_class is Colliding else 0
                expected = seq.token_ids[begin:end]
                assert contents[block.block_id][-len(expected) :] == expected
            if manager_class is BlockManager:
                assert len(prefix) == count_hits(manager, contents, seq.token_ids)
            # As a feature can. The rest becomes duplicates.
            prefix = prefix[: data.draw(st.sampled_from([4, 4, 0, 1]))]
            num_shared = len([block for block in prefix if block.ref_count > 0])
            num_needed = cdiv(len(seq.token_ids), BLOCK_SIZE) - num_shared
            fits = num_needed <= len(manager.free_block_ids)
            succeeds = admit(manager, seq, prefix)
            assert succeeds == fits
            if succeeds:
                written = seq.block_table[len(prefix) :]
                live.append(seq)
        else:
            seq = data.draw(st.sampled_from(live))
        if action == "grow":
            num_tokens = len(seq.token_ids)
            seq.token_ids += data.draw(st.lists(TOKENS, min_size=1, max_size=5))
            num_old = len(seq.block_table)
            num_needed = cdiv(len(seq.token_ids), BLOCK_SIZE) - num_old
            fits = num_needed <= len(manager.free_block_ids)
            succeeds = manager.grow(seq)
            assert succeeds == fits
            if succeeds:
                compute(manager, seq)
                written = seq.block_table[num_old - 1 :]
            else:
                del seq.token_ids[num_tokens:]
        if action in ("free", "error"):
            live.remove(seq)
            seq.finish_reason = {"free": "length", "error": "error"}[action]
            if action == "error":
                manager.uncache_sequence(seq)
                assert manager_class is Colliding or not manager.find_prefix(seq)
            manager.release(seq)
        assert succeeds or repr({**vars(manager), "blocked": None}) == before
        for block_id in written:
            index = seq.block_table.index(block_id)
            contents[block_id] = seq.token_ids[: (index + 1) * BLOCK_SIZE]
        for seq in live if manager_class is BlockManager else ():
            assert len(set(seq.block_table)) == len(seq.block_table)
            for index, block_id in enumerate(seq.block_table):
                assert contents[block_id] == seq.token_ids[: (index + 1) * BLOCK_SIZE]
        check(manager, live)


def test_a_table_grows_for_a_pending_token():
    """Its K/V are written before the host knows it."""
    manager = BlockManager(2, BLOCK_SIZE)
    seq = serve(manager, 1, 2)
    seq.token_ids.append(-1)
    assert manager.grow(seq)
    assert seq.block_table == [0, 1]


def test_a_block_that_a_pending_token_fills_has_no_hash():
    manager = BlockManager(2, BLOCK_SIZE)
    seq = serve(manager, 1, 2, 3)
    seq.token_ids.append(-1)
    manager.release(seq)
    assert len(seq.block_hashes) == 1


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
    assert not admit(manager, make_sequence(5, 5, 5))
    manager.release(blocked)
    assert admit(manager, make_sequence(6)), "another one, which can share blocks with it"
    assert manager.blocked is None


def test_the_newest_failure_is_remembered():
    """The head of the queue can be aborted, and the next head must not be searched again."""
    manager = BlockManager(2, BLOCK_SIZE)
    serve(manager, 1, 1, 1)
    heads = [make_sequence(token_id, token_id) for token_id in (2, 3)]
    for head in heads:
        assert not admit(manager, head)
    assert [manager.is_still_blocked(head) for head in heads] == [False, True]


def test_blocks_that_are_shared_need_no_free_ones():
    manager = BlockManager(4, BLOCK_SIZE)
    serve(manager, 1, 1, 2, 2, 3)
    assert serve(manager, 1, 1, 2, 2, 4).block_table == [0, 1, 3]


def test_a_free_prefix_is_not_taken_for_new_blocks():
    manager = BlockManager(3, BLOCK_SIZE)
    for seq in [serve(manager, 1, 1), serve(manager, 2, 2)]:
        manager.release(seq)
    assert serve(manager, 1, 1, 5, 5, 5).block_table == [0, 2, 1]


def test_a_failed_admission_evicts_and_moves_no_block():
    manager = BlockManager(4, BLOCK_SIZE)
    for seq in [serve(manager, 1, 1), serve(manager, 2, 2)]:
        manager.release(seq)
    order = list(manager.free_block_ids)
    assert not admit(manager, make_sequence(1, 1, *[5] * 9))
    assert list(manager.free_block_ids) == order
    assert find_hits(manager, 2, 2, 3) == [1]
