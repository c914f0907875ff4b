"""The block manager: hits, collisions, duplicates and eviction, against a simple model of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE = 2
PARAMS = SamplingParams()


class Colliding(BlockManager):
    """A block manager in which all hashes are one of two values."""

    @classmethod
    def compute_hash(cls, token_ids, prefix=-1):
        return sum(token_ids) % 2


def check(manager, seqs):
    held = [block_id for seq in seqs for block_id in seq.block_table]
    free = list(manager.free_block_ids)
    assert sorted([*set(held), *free]) == list(range(manager.num_blocks))
    for block in manager.blocks:
        assert block.ref_count == held.count(block.block_id)
        assert block.hash == -1 or manager.hash_to_block_id[block.hash] == block.block_id
    for hash_, block_id in manager.hash_to_block_id.items():
        assert manager.blocks[block_id].hash == hash_
    unlisted = [manager.blocks[block_id].hash == -1 for block_id in free]
    assert isinstance(manager, Colliding) or unlisted == sorted(unlisted, reverse=True), (
        "unlisted blocks are taken first"
    )


def snapshot(manager):
    blocks = [(b.ref_count, b.hash, tuple(b.token_ids)) for b in manager.blocks]
    return list(manager.free_block_ids), dict(manager.hash_to_block_id), blocks


def admit(manager, seq):
    if not manager.allocate(seq, manager.find_prefix(seq)):
        return False
    manager.list_full_blocks(seq, seq.num_computed_tokens, len(seq.token_ids))
    seq.num_computed_tokens = len(seq.token_ids)
    return True


@given(
    data=st.data(),
    num_blocks=st.integers(1, 12),
    manager_class=st.sampled_from([BlockManager, Colliding]),
    caching=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_random_life(data, num_blocks, manager_class, caching):
    """Blocks hold what they claim in any order of calls. `contents` has the prefix of each block."""
    manager = manager_class(num_blocks, BLOCK_SIZE, caching)
    live: list[Sequence] = []
    contents: dict[int, list[int]] = {}
    for seq_id in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["admit", "admit", "gain", "gain", "free"]))
        before = snapshot(manager)
        if action == "admit":
            seq = Sequence(
                seq_id, data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9)), PARAMS
            )
            prefix = manager.find_prefix(seq)
            assert caching or not prefix
            assert len(prefix) * BLOCK_SIZE < len(seq.token_ids)
            for i, block in enumerate(prefix):
                prefix_tokens = seq.token_ids[: (i + 1) * BLOCK_SIZE]
                assert contents[block.block_id][-BLOCK_SIZE:] == prefix_tokens[-BLOCK_SIZE:], (
                    "a hit on other tokens"
                )
                assert manager_class is Colliding or contents[block.block_id] == prefix_tokens, (
                    "a hit on another prefix"
                )
            if admit(manager, seq):
                live.append(seq)
            else:
                assert snapshot(manager) == before and seq.block_table == []
        elif live:
            seq = data.draw(st.sampled_from(live))
            if action == "gain":
                seq.token_ids.append(data.draw(st.integers(0, 1)))
                if manager.grow(seq):
                    manager.list_full_blocks(seq, seq.num_computed_tokens, len(seq.token_ids))
                    seq.num_computed_tokens = len(seq.token_ids)
                else:
                    assert snapshot(manager) == before
                    seq.token_ids.pop()
            else:
                manager.free(seq)
                live.remove(seq)
        for seq in live:
            for i, block_id in enumerate(seq.block_table[: seq.num_computed_tokens // BLOCK_SIZE]):
                contents[block_id] = seq.token_ids[: (i + 1) * BLOCK_SIZE]
        check(manager, live)


def test_shared_within_a_step_and_last_token_recomputed():
    manager = BlockManager(10, 4)
    first, second = (Sequence(i, list(range(8)), PARAMS) for i in range(2))
    assert admit(manager, first)
    assert admit(manager, second)
    assert second.block_table[0] == first.block_table[0], "published when planned"
    assert second.block_table[1] != first.block_table[1], "the last token's logits are needed"
    assert manager.blocks[first.block_table[0]].ref_count == 2


def test_hash_is_chained():
    one = BlockManager.compute_hash([1, 2, 3])
    assert one == BlockManager.compute_hash([1, 2, 3]) != BlockManager.compute_hash([1, 2, 4])
    assert BlockManager.compute_hash([4], one) != BlockManager.compute_hash([4])


def test_a_collision_of_other_tokens_is_no_hit():
    manager = Colliding(10, 2)
    assert admit(manager, Sequence(0, [1, 1, 0, 0, 5], PARAMS))
    assert manager.find_prefix(Sequence(1, [0, 2, 0, 0, 5], PARAMS)) == []


def test_each_engine_has_hashes_of_its_own():
    tables = []
    for _ in range(2):
        manager = BlockManager(10, 2)
        assert admit(manager, Sequence(0, [1, 1, 2], PARAMS))
        tables.append(set(manager.hash_to_block_id))
    assert not tables[0] & tables[1] and max(tables[0]) > 2**64


def test_eviction_is_least_recently_used_and_tail_first():
    manager = BlockManager(7, 2)
    old, new = Sequence(0, [1, 1, 2, 2, 3, 3, 9], PARAMS), Sequence(1, [4, 4, 5, 5, 9], PARAMS)
    assert admit(manager, old) and admit(manager, new)
    old_table, new_table = old.block_table, new.block_table
    manager.free(old)
    manager.free(new)
    assert list(manager.free_block_ids)[2:] == [
        old_table[2],
        old_table[1],
        old_table[0],
        new_table[1],
        new_table[0],
    ]
    again = Sequence(2, [1, 1, 2, 2, 3, 3, 9], PARAMS)
    assert admit(manager, again)
    assert again.block_table[:3] == old_table[:3]
    manager.free(again)
    assert list(manager.free_block_ids)[-5:] == [
        new_table[1],
        new_table[0],
        old_table[2],
        old_table[1],
        old_table[0],
    ]


def test_duplicates_do_not_unmap_each_other():
    """Two sequences compute the same block at once. One copy is listed until it is evicted."""
    manager = BlockManager(4, 2)
    first, duplicate = Sequence(0, [1, 1, 2], PARAMS), Sequence(1, [1, 1, 2], PARAMS)
    assert manager.allocate(first, []) and manager.allocate(duplicate, [])
    manager.list_full_blocks(first, first.num_computed_tokens, 3)
    manager.list_full_blocks(duplicate, duplicate.num_computed_tokens, 3)
    duplicate_table = duplicate.block_table
    manager.free(duplicate)
    assert manager.allocate(Sequence(2, [7, 7, 7], PARAMS), [])  # takes the duplicate's blocks
    assert manager.blocks[duplicate_table[0]].hash == -1
    assert [
        block.block_id for block in manager.find_prefix(Sequence(3, [1, 1, 2], PARAMS))
    ] == first.block_table[:1]


def make_duplicates():
    """Two sequences that computed the same first block separately. Only the second has a tail."""
    manager = BlockManager(6, 2)
    first, duplicate = Sequence(0, [1, 1, 2], PARAMS), Sequence(1, [1, 1, 2, 2, 3], PARAMS)
    assert manager.allocate(first, []) and manager.allocate(duplicate, [])
    manager.list_full_blocks(first, first.num_computed_tokens, 3)
    manager.list_full_blocks(duplicate, duplicate.num_computed_tokens, 5)
    return manager, first, duplicate


def test_a_duplicate_can_be_a_parent():
    manager, first, duplicate = make_duplicates()
    hits = [block.block_id for block in manager.find_prefix(Sequence(2, [1, 1, 2, 2, 3], PARAMS))]
    assert hits == [first.block_table[0], duplicate.block_table[1]]


def test_a_head_with_a_duplicate_is_not_evicted_before_its_tail():
    manager, first, duplicate = make_duplicates()
    head, tail = first.block_table[0], duplicate.block_table[1]
    manager.free(first)
    manager.free(duplicate)
    assert list(manager.free_block_ids)[-2:] == [tail, head]


@pytest.fixture(params=[64, 100_000])
def big_manager(request):
    yield BlockManager(request.param, 16)


def test_whole_pool_can_be_used(big_manager):
    seq = Sequence(0, [0] * (big_manager.num_blocks * 16), PARAMS)
    assert admit(big_manager, seq) and not big_manager.free_block_ids
    seq.token_ids.append(0)
    assert not big_manager.grow(seq)
    big_manager.free(seq)
    assert len(big_manager.free_block_ids) == big_manager.num_blocks
