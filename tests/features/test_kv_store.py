"""K/V that come back from RAM or from a folder are those that were computed."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import (
    check_idle,
    check_invariants,
    edit_config,
    edit_weights,
    find_feature,
    generate_ids,
    greedy,
    make_checkpoint,
    random_prompt,
)
from families import make_family

from nanovllm import LLM, SamplingParams
from nanovllm.features.kv_store import folder_store, stored_prefixes
from nanovllm.features.kv_store.folder_store import FolderStore, read_entry
from nanovllm.features.kv_store.ram_store import RamStore
from nanovllm.features.kv_store.stored_prefixes import SavedPrefixes, StoredPrefixes
from nanovllm.features.kv_store.tensors import Entry
from nanovllm.features.recurrent_states import RecurrentStates

OPTIONS = {
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 40,
    "max_model_len": 150,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
}
PROMPTS = [random_prompt(seed, 58) for seed in range(5)]
STORES = ["kv_offloading_size", "kv_cache_dir"]


def use_store(store, tmp_path):
    return {store: 1.0 if store == "kv_offloading_size" else tmp_path / "kv"}


@pytest.fixture
def make_stored(make_llm, tmp_path):
    """A function that makes an engine with a folder for K/V, and small pools."""

    def make(*args, **options):
        return make_llm(*args, **{**OPTIONS, "kv_cache_dir": tmp_path / "kv", **options})

    return make


def list_entries(tmp_path):
    return sorted((tmp_path / "kv").glob("*/*.kv"))


def test_what_the_pool_evicts_is_still_there(tmp_path):
    """For all tokens, windows, windows only, and states. Also after a restart, in a folder."""
    for name in ("qwen3", "gemma3", "mistral-window", "qwen3.5"):
        directory = tmp_path / name
        oracle = make_family(directory, name, vocab_size=100, max_position_embeddings=256)
        expected = [oracle(prompt, 6) for prompt in PROMPTS]
        longer = [prompt + reply + [7, 8] for prompt, reply in zip(PROMPTS, expected)]
        expected_longer = [oracle(prompt, 6) for prompt in longer]
        num_hits = 60 if name != "qwen3.5" else 56
        for store in (*STORES, "kv_cache_dir"):
            with LLM(directory, **OPTIONS, **use_store(store, directory)) as llm:
                for _ in range(2):
                    outputs = [llm.generate(prompt, greedy(6))[0] for prompt in PROMPTS]
                    assert [output["token_ids"] for output in outputs] == expected
                assert [output["num_cached_tokens"] for output in outputs] == [56] * 5
                outputs = [llm.generate(prompt, greedy(6))[0] for prompt in longer]
                assert [output["token_ids"] for output in outputs] == expected_longer
                assert min(output["num_cached_tokens"] for output in outputs) >= num_hits
                assert llm.stats["num_restored_tokens"] >= 10 * 56
                check_idle(llm)


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5"])
def test_windows_and_states_come_back_to_k_v_that_the_pool_has(tmp_path, name):
    """The first pool is large. There is room for few windows, and for few states."""
    oracle = make_family(tmp_path, name, vocab_size=100, max_position_embeddings=256)
    expected = [oracle(prompt, 6) for prompt in PROMPTS]
    options = {**OPTIONS, "num_kvcache_blocks": 400, "max_num_seqs": 1}
    hits = []
    for size in (None, 1.0):
        with LLM(tmp_path, **options, kv_offloading_size=size) as llm:
            for _ in range(2):
                outputs = [llm.generate(prompt, greedy(6))[0] for prompt in PROMPTS]
                assert [output["token_ids"] for output in outputs] == expected
            hits.append([output["num_cached_tokens"] for output in outputs])
    assert hits == [[0] * 5, [56] * 5]


@pytest.mark.parametrize("store", STORES)
def test_preempted_sequences_find_their_blocks(make_llm, tmp_path, store):
    """In a pool that two sequences fill. A step restores a block, while another one runs."""
    prompts = PROMPTS[:2]
    options = {**OPTIONS, "num_kvcache_blocks": 38, **use_store(store, tmp_path)}
    expected = [make_llm().generate(prompt, greedy(40))[0]["token_ids"] for prompt in prompts]
    llm = make_llm(**options)
    assert generate_ids(llm, prompts, greedy(40)) == expected
    assert llm.stats["num_preemptions"] > 0
    assert llm.stats["num_restored_tokens"] > 0
    check_idle(llm)


def test_restoring_is_limited_while_others_run(make_llm, monkeypatch):
    monkeypatch.setattr(stored_prefixes, "_BYTES_PER_STEP", 1)
    llm = make_llm(**OPTIONS, kv_offloading_size=1.0)
    expected = generate_ids(llm, [PROMPTS[0]], greedy(6))
    for prompt in PROMPTS[1:]:
        llm.generate(prompt, greedy(6))
    llm.add_request(PROMPTS[4], greedy(30))
    llm.step()
    llm.add_request(PROMPTS[0], greedy(6))
    before = llm.stats["num_restored_tokens"]
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
        check_invariants(llm)
        restored = llm.stats["num_restored_tokens"]
        assert restored - before <= 4
        before = restored
    (output,) = [each for each in outputs if each["finish_reason"] and len(each["token_ids"]) == 6]
    assert output["token_ids"] == expected[0]
    assert output["num_cached_tokens"] == 56


def test_engines_share_a_folder(make_stored, tmp_path, capfd):
    """One computes prompts, and another one, which is there already, decodes."""
    prefill, decode = make_stored(), make_stored()
    assert capfd.readouterr().err.count(str(tmp_path / "kv")) == 2
    expected = generate_ids(make_stored(kv_cache_dir=None), PROMPTS, greedy(6))
    for prompt in PROMPTS:
        prefill.generate(prompt, greedy(1))
    prefill.exit()
    outputs = decode.generate(PROMPTS, greedy(6))
    assert [output["token_ids"] for output in outputs] == expected
    assert [output["num_cached_tokens"] for output in outputs] == [56] * 5
    saved = find_feature(decode, SavedPrefixes)
    assert [saved.count_tokens(prompt) for prompt in (PROMPTS[0], random_prompt(9, 58))] == [56, 0]


def test_a_changed_model_finds_nothing(make_stored, tmp_path):
    """A training loop writes files of the same size, perhaps within the resolution of times."""
    directory = tmp_path / "model"
    make_checkpoint(directory)

    def count_hits(**options):
        llm = make_stored(str(directory), **options)
        (output,) = llm.generate(PROMPTS[0], greedy(4))
        llm.exit()
        return output["num_cached_tokens"]

    assert count_hits() == 0
    assert count_hits() == 56
    assert count_hits(kvcache_block_size=8) == 0
    assert count_hits(enable_kernels=False) == 0
    edit_weights(directory, lambda weights: weights["model.norm.weight"].add_(1.0))
    assert count_hits() == 0
    assert count_hits() == 56
    edit_config(directory, rms_norm_eps=0.1)
    assert count_hits() == 0


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:50])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, cut, empty])
def test_damaged_files_are_deleted_and_computed_again(make_stored, tmp_path, damage, capfd):
    first = make_stored()
    expected = generate_ids(first, PROMPTS[:1], greedy(4))
    first.exit()
    entries = list_entries(tmp_path)
    assert len(entries) == 15
    (path,) = [each for each in entries if read_entry(each).token_ids == PROMPTS[0][:4]]
    damage(path)
    capfd.readouterr()
    second = make_stored()
    assert generate_ids(second, PROMPTS[:1], greedy(4)) == expected
    assert second.stats["num_cached_tokens"] == 0
    second.exit()
    assert read_entry(path).token_ids == PROMPTS[0][:4]
    assert capfd.readouterr().err.count("cannot keep or return K/V") == 1
    third = make_stored()
    assert generate_ids(third, PROMPTS[:1], greedy(4)) == expected
    assert third.stats["num_cached_tokens"] == 56


def test_tokens_are_compared(make_stored, tmp_path):
    """As if two blocks had the same hash."""
    first = make_stored()
    first.generate(PROMPTS[0], greedy(4))
    first.exit()
    for path in list_entries(tmp_path):
        _, content, _ = read_entry(path)
        folder_store.write_entry(path, Entry([1, 2, 3, 4], content))
    second = make_stored()
    second.generate(PROMPTS[0], greedy(4))
    assert second.stats["num_restored_tokens"] == 0


def test_a_full_disk_and_a_lost_folder_cost_one_line(make_stored, tmp_path, monkeypatch, capfd):
    plain = make_stored(kv_cache_dir=None)
    expected = generate_ids(plain, PROMPTS, greedy(4))
    for problem in ("full", "lost"):
        llm = make_stored()
        capfd.readouterr()
        if problem == "lost":
            shutil.rmtree(tmp_path / "kv")
        else:
            error = OSError(28, "No space left on device")
            monkeypatch.setattr(folder_store, "save_file", raise_error(error))
        for _ in range(2):
            assert generate_ids(llm, PROMPTS, greedy(4)) == expected
        llm.exit()
        assert capfd.readouterr().err.count("cannot keep or return K/V") == 1
        monkeypatch.undo()
    (tmp_path / "file").touch()
    llm = make_stored(kv_cache_dir=tmp_path / "file" / "kv")
    assert "no K/V are kept" in capfd.readouterr().err
    assert generate_ids(llm, PROMPTS, greedy(4)) == expected


def raise_error(error):
    def fail(*args, **options):
        raise error

    return fail


def test_a_folder_of_others_can_be_read(make_stored, tmp_path, monkeypatch):
    """Files can neither be touched nor deleted."""
    first = make_stored()
    expected = generate_ids(first, PROMPTS, greedy(4))
    first.exit()
    flip(list_entries(tmp_path)[0])
    error = PermissionError(1, "Operation not permitted")
    monkeypatch.setattr(folder_store.os, "utime", raise_error(error))
    monkeypatch.setattr(folder_store.Path, "unlink", raise_error(error))
    second = make_stored()
    assert generate_ids(second, PROMPTS, greedy(4)) == expected
    assert second.stats["num_restored_tokens"] >= 4 * 56


def test_a_slow_disk_drops_blocks(make_stored, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_store, "_MAX_QUEUED_BYTES", 1)
    llm = make_stored()
    llm.generate(PROMPTS[0], greedy(4))
    llm.exit()
    assert not list_entries(tmp_path)


@pytest.mark.parametrize("store", STORES)
def test_what_is_not_finite_is_not_restored(make_llm, tmp_path, store):
    """NaN in the first chunk of a prompt, which is aborted before a chunk that has logits."""
    llm = make_llm(**{**OPTIONS, "max_num_batched_tokens": 16}, **use_store(store, tmp_path))
    expected = generate_ids(make_llm(), PROMPTS[:1], greedy(4))
    request_id = llm.add_request(PROMPTS[0], greedy(4))
    llm.step()
    llm.step()
    (seq,) = llm.scheduler.running
    with torch.inference_mode():
        llm.executor.worker.kv_caches[1][1, seq.block_table[2]] = torch.nan
    llm.abort(request_id)
    for prompt in PROMPTS[1:]:
        llm.generate(prompt, greedy(4))
    assert generate_ids(llm, PROMPTS[:1], greedy(4)) == expected
    assert llm.stats["num_restored_tokens"] == 8  # the blocks before it


def test_a_store_has_at_most_its_size(make_stored, make_llm, tmp_path):
    size = 2**-14  # 64 KiB, of blocks of 2 KiB
    for seed in range(4):
        llm = make_stored(kv_cache_dir_size=size)
        for each in range(3):
            llm.generate(random_prompt(10 * seed + each, 100), greedy(4))
        llm.exit()
        num_bytes = sum(path.stat().st_size for path in list_entries(tmp_path))
        assert 2**15 < num_bytes <= 2**16
    # The tail of a sequence goes before its head.
    tokens = {tuple(read_entry(path).token_ids) for path in list_entries(tmp_path)}
    newest = random_prompt(10 * seed + each, 100)
    is_left = [tuple(newest[i : i + 4]) in tokens for i in range(0, 96, 4)]
    assert is_left == sorted(is_left, reverse=True)
    assert is_left[0]
    llm = make_llm(**OPTIONS, kv_offloading_size=size)
    llm.generate(PROMPTS, greedy(4))
    store = find_feature(llm, StoredPrefixes).store
    assert store.num_used_bytes == sum(each.content.nbytes for each in store.entries.values())
    assert 2**15 < store.num_used_bytes <= 2**16


def test_the_least_recently_used_entries_go_first():
    store = RamStore(3 * 8)
    for key in "abc":
        store.put(key, Entry([1], torch.ones(2)))
    assert store.keep("a")
    assert store.get("b", [1]) is not None
    assert store.get("b", [2]) is None
    store.put("d", Entry([1], torch.ones(2)))
    assert list(store.entries) == ["a", "b", "d"]
    store.put("e", Entry([1], torch.full([2], torch.inf)))
    assert store.get("e", [1]) is None
    assert store.num_used_bytes == 2 * 8


def test_the_tail_of_a_sequence_goes_before_its_head(make_llm):
    llm = make_llm(**OPTIONS, kv_offloading_size=2**-15)
    llm.generate(PROMPTS[0], greedy(4))
    entries = find_feature(llm, StoredPrefixes).store.entries
    tokens = [entry.token_ids for entry in entries.values()]
    assert tokens[-1] == PROMPTS[0][:4]
    assert tokens[-2] == PROMPTS[0][4:8]


def test_a_folder_gets_one_root(tmp_path):
    """Whatever the number of engines that make it, and without a file that is seen half-written."""
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: FolderStore(tmp_path, 100, {"a": 1}), range(8)))
    assert len({store.root_hash for store in stores}) == 1
    assert len({store.subfolder for store in stores}) == 1
    assert [path.name for path in tmp_path.iterdir()] == [stores[0].subfolder.name]
    assert FolderStore(tmp_path, 100, {"a": 2}).root_hash != stores[0].root_hash


def test_only_the_owner_reads_a_folder(make_stored, tmp_path, capfd):
    make_stored().exit()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert "others can read" not in capfd.readouterr().err
    (tmp_path / "kv").chmod(0o755)
    make_stored().exit()
    assert "others can read" in capfd.readouterr().err


def test_requests_with_other_salts_share_nothing(make_llm, tmp_path):
    llm = make_llm(**OPTIONS, kv_offloading_size=1.0)
    hits = []
    for salt in (None, "a", "b", "a", None):
        params = SamplingParams(temperature=0.0, max_tokens=2, cache_salt=salt)
        (output,) = llm.generate(PROMPTS[0], params)
        hits.append(output["num_cached_tokens"])
    assert hits == [0, 0, 0, 56, 56]


@pytest.mark.parametrize("store", STORES)
def test_a_stream_can_be_closed_after_exit(make_llm, tmp_path, store):
    llm = make_llm(**OPTIONS, **use_store(store, tmp_path))
    stream = llm.stream(PROMPTS[0], greedy(40))
    next(stream)
    llm.exit()
    stream.close()


def test_no_slot_is_lost_if_a_state_is_restored_while_it_is_computed(tmp_path):
    """Another engine has stored the state that this step keeps as a snapshot."""
    make_family(tmp_path / "model", "qwen3.5", vocab_size=100, max_position_embeddings=256)
    options = {**OPTIONS, "num_kvcache_blocks": 90, "max_num_batched_tokens": 16}
    options["kv_cache_dir"] = tmp_path / "kv"
    with LLM(tmp_path / "model", **options) as one, LLM(tmp_path / "model", **options) as two:
        for prompt in PROMPTS[:3]:
            one.add_request(prompt, greedy(4))
            for _ in range(3):
                one.step()
            two.generate(prompt, greedy(1))
            one.add_request(prompt, greedy(4))
            while not one.is_finished():
                one.step()
            states = find_feature(one, RecurrentStates)
            slots = [*states.empty_slots, *states.snapshots.values()]
            assert sorted(slots) == list(states.snapshot_slots)


def test_unusable_options_are_rejected(make_llm, tmp_path):
    options = [
        ({"kv_offloading_size": 1, "kv_cache_dir": tmp_path}, "exclude each other"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "enable_prefix_caching=True"),
        ({"kv_cache_dir": tmp_path, "tensor_parallel_size": 2}, "tensor_parallel_size > 1"),
        ({"kv_offloading_size": 1e-9}, "no room for a block"),
        ({"kv_offloading_size": -1}, "kv_offloading_size"),
        ({"kv_cache_dir": 3}, "kv_cache_dir"),
    ]
    for given, message in options:
        with pytest.raises((ValueError, TypeError), match=message):
            make_llm(**OPTIONS, **given)


def test_interrupted_files_are_cleared(make_stored, tmp_path):
    make_stored().exit()
    (subfolder,) = [path for path in (tmp_path / "kv").iterdir() if path.is_dir()]
    old, new = subfolder / "old.tmp", subfolder / "new.tmp"
    for path in (old, new):
        path.touch()
    folder_store.os.utime(old, (1, 1))
    llm = make_stored()
    llm.generate(PROMPTS[0], greedy(4))
    llm.exit()
    assert not old.exists()
    assert new.exists()
