"""Extends the prefix cache by a store (ram_store.py, folder_store.py).

A sequence that finishes or is preempted leaves its full blocks in the store. A waiting sequence
gets the blocks behind its prefix hit from there:

    pool     | b0 b1 |                    the prefix hit of the block manager
    store    | b0 b1 | b2 b3 b4 |         written to free blocks, which are then cached
    prompt   | b0 b1 | b2 b3 b4 | b5      computed by the step

A restored block is an ordinary cached block, so no other part of the engine depends on stores. The
window before the end of the prefix goes to the second pool in the same way, and a recurrent state
becomes a snapshot. Hashes and tokens are compared as in a prefix hit. What is not finite is not
restored, because NaN shows only in logits, which most chunks do not have.

Restoring takes time of the step, so it is limited while other sequences run. The sequence then
waits, and later steps restore the rest.
"""

import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers

from nanovllm.checkpoints.tensor_files import MTP_FILE, list_files
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.feature import Facts, Feature
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.features.kv_store.folder_store import FolderStore, hash_files
from nanovllm.features.kv_store.ram_store import RamStore
from nanovllm.features.kv_store.tensors import EntryKind
from nanovllm.features.recurrent_states import RecurrentStates
from nanovllm.features.windows import Windows
from nanovllm.utils.checks import invalid
from nanovllm.utils.helpers import cdiv, report
from nanovllm.worker.worker import Worker

_FORMAT = 1  # to be raised when K/V of a model, or the files, change
_BYTES_PER_STEP = 32 << 20  # restored while other sequences run, some 30 ms from files
FoundFeature = TypeVar("FoundFeature", bound=Feature)


class StoredPrefixes(Feature):
    """Moves K/V between the KV cache and RAM. Comes before the features that shorten a prefix."""

    serves = "kv_offloading_size"
    store: RamStore | FolderStore
    is_idle = False  # the store has K/V of other weights

    def start(self, engine: LLMEngine) -> bool:
        config = engine.config
        if not getattr(config, self.serves):
            return False
        if not config.enable_prefix_caching:
            raise invalid(self.serves, "needs enable_prefix_caching=True")
        if config.tensor_parallel_size > 1:
            raise invalid(self.serves, "does not work with tensor_parallel_size > 1")
        worker = engine.executor.worker
        self.blocks, self.windows, self.states = group_layers(worker)
        self.features = weakref.proxy(engine.features)
        self.num_stored_blocks = 0
        self.num_restored_tokens = 0
        store = self.make_store(engine)
        if store is None:
            return False
        self.store = store
        needed = self.blocks.num_bytes
        if store.num_bytes < needed:
            raise invalid(self.serves, f"has no room for a block of {needed} bytes: raise its size")
        return super().start(engine)

    def make_store(self, engine: LLMEngine) -> RamStore | FolderStore | None:
        return RamStore(int(cast(float, engine.config.kv_offloading_size) * 2**30))

    def weights_changed(self, is_original: bool) -> None:
        self.store.close()  # which empties RAM

    def find_feature(self, kind: type[FoundFeature]) -> FoundFeature | None:
        """Find a feature of this engine. They start after this one."""
        return next((each for each in self.features if isinstance(each, kind)), None)

    def reset(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        self.num_bytes_left = _BYTES_PER_STEP
        self.waiting_for: Sequence | None = None  # the rest of its blocks
        self.restored: list[tuple[int, int, int, str, str]] = []  # as `describe` explains them

    def limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        """Restore what is stored behind `prefix`, and return the longer prefix."""
        manager = self.scheduler.block_manager
        num_shared = len([block for block in prefix if block.ref_count > 0])
        num_new = cdiv(len(seq.token_ids), manager.block_size) - num_shared
        if self.is_idle or num_new > len(manager.free_block_ids):
            return prefix  # a sequence without room is not admitted
        start = len(prefix)
        end = (len(seq.token_ids) - 1) // manager.block_size
        states = self.find_feature(RecurrentStates)
        if states is not None:
            end = self._restore_state(states, seq, end)
        windows = self.find_feature(Windows)
        if windows is not None:
            end = self._restore_window(windows, seq, end)
        blocks = list(prefix)
        for shared in prefix:  # so that none of them is evicted
            manager.share(shared)
        for index in range(start, end):
            block = manager.find_block(seq, index)
            if block is not None:  # behind blocks that were evicted
                manager.share(block)
            elif self.num_bytes_left > 0 or not self.scheduler.running:
                block = self._restore_block(self.blocks, manager, seq, index)
            else:
                self.waiting_for = seq
            if block is None:
                break
            blocks.append(block)
        for index in reversed(range(len(blocks))):
            manager.release_block(seq, index, blocks[index].block_id)
        return blocks

    def _restore_state(self, states: RecurrentStates, seq: Sequence, end: int) -> int:
        """Restore the last state that is stored. Return the number of blocks before it."""
        manager = self.scheduler.block_manager
        states.keeps_prompts = True
        for index in reversed(range(end)):
            block_hash = manager.hash_block(seq, index)
            if block_hash in states.snapshots or block_hash in states.new_snapshots:
                return index + 1
            entry = self.store.get(self.states.key(block_hash), manager.get_tokens(seq, index))
            slot = states.take_slot() if entry is not None else None
            if entry is not None and slot is not None:
                self.states.write(slot, entry.content)
                states.snapshots[block_hash] = slot
                self.num_bytes_left -= self.states.num_bytes
                return index + 1
        return 0

    def _restore_window(self, windows: Windows, seq: Sequence, end: int) -> int:
        """Restore the window before the longest prefix that has one. Return its blocks."""
        index = end
        while index > windows.find_start(end):
            index -= 1
            if windows.pool.find_block(seq, index) is None:
                block = self._restore_block(self.windows, windows.pool, seq, index)
                if block is None:
                    end = index  # the prefix has to end before this block
                else:
                    windows.pool.release_block(seq, index, block.block_id)
        return end

    def _restore_block(
        self, kind: EntryKind, pool: BlockManager, seq: Sequence, index: int
    ) -> Block | None:
        """Write a stored block to a free one of a pool, and cache it there. The caller holds it."""
        block_hash = pool.hash_block(seq, index)
        entry = self.store.get(kind.key(block_hash), pool.get_tokens(seq, index))
        if entry is None or not pool.free_block_ids:
            return None
        block_id = pool.take()
        kind.write(block_id, entry.content)
        pool.cache_block(seq, index, block_id)
        self.num_bytes_left -= kind.num_bytes
        if kind is self.blocks:
            self.num_restored_tokens += pool.block_size
            parent = f"{seq.block_hashes[index - 1]:032x}" if index > 0 else ""
            self.restored.append((block_id, seq.seq_id, index, f"{block_hash:032x}", parent))
        return pool.blocks[block_id]

    def may_start(self, seq: Sequence) -> bool:
        return seq is not self.waiting_for

    def releasing(self, seq: Sequence) -> None:
        """Store what is computed. The tail comes first, as in an eviction."""
        if self.is_idle or seq.finish_reason == "error":
            return
        manager = self.scheduler.block_manager
        states = self.find_feature(RecurrentStates)
        windows = self.find_feature(Windows)
        num_known = min(seq.num_computed_tokens, seq.num_known_tokens)
        for index in reversed(range(num_known // manager.block_size)):
            block_hash = manager.hash_block(seq, index)
            places: list[tuple[EntryKind, int]] = [(self.blocks, seq.block_table[index])]
            if windows is not None:
                block = windows.pool.find_block(seq, index)
                places += [(self.windows, block.block_id)] if block is not None else []
            if states is not None and block_hash in states.snapshots:
                places.append((self.states, states.snapshots[block_hash]))
            for kind, place in places:
                key = kind.key(block_hash)
                if not self.store.keep(key):
                    self.store.put(key, kind.read(place, manager.get_tokens(seq, index)))
                    self.num_stored_blocks += kind is self.blocks

    def count_tokens(self, token_ids: list[int]) -> int:
        """Count the tokens at the start of a prompt whose blocks are stored. A router may ask."""
        manager = self.scheduler.block_manager
        block_hash = manager.root_hash
        for start in range(0, len(token_ids) - manager.block_size, manager.block_size):
            tokens = token_ids[start : start + manager.block_size]
            block_hash = manager.compute_hash(tokens, block_hash)
            if not self.store.keep(self.blocks.key(block_hash)):
                return start
        return (len(token_ids) - 1) // manager.block_size * manager.block_size

    def exit(self) -> None:
        self.is_idle = True  # sequences may be released afterwards
        if "store" in vars(self):
            self.store.close()

    def stats(self) -> dict[str, int]:
        return {
            "num_stored_blocks": self.num_stored_blocks,
            "num_restored_tokens": self.num_restored_tokens,
        }

    def describe(self, step: Step) -> tuple[Facts, dict[Sequence, Facts]]:
        """List restored blocks: id, sequence, logical block, hash, and the hash before it."""
        return {"restored_blocks": self.restored}, {}


class SavedPrefixes(StoredPrefixes):
    """Moves K/V between the KV cache and a folder, which belongs to the checkpoint's weights."""

    serves = "kv_cache_dir"
    store: FolderStore

    def make_store(self, engine: LLMEngine) -> FolderStore | None:
        num_bytes = int(engine.config.kv_cache_dir_size * 2**30)
        folder = Path(cast(str, engine.config.kv_cache_dir)).expanduser()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o077:
                report(f"kv_cache_dir: others can read {folder}: chmod 700 keeps prompts private")
            self.weights = hash_weights(engine.executor.worker, folder)
            store = FolderStore(folder, num_bytes, describe_model(engine, self.weights))
        except (OSError, ValueError) as error:
            report(f"kv_cache_dir: no K/V are kept: {error}")
            return None
        report(f"kv_cache_dir: {store.subfolder} has the K/V of this model")
        engine.scheduler.block_manager.root_hash = store.root_hash
        return store

    def weights_changed(self, is_original: bool) -> None:
        """The checkpoint may have other weights than when the engine started."""
        self.is_idle = True
        if is_original:
            with suppress(OSError, ValueError):
                weights = hash_weights(self.blocks.worker, self.store.folder)
                self.is_idle = weights != self.weights


def group_layers(worker: Worker) -> tuple[EntryKind, EntryKind, EntryKind]:
    """Divide the layers by what they keep: blocks, blocks of the second pool, or states."""
    groups: dict[str, list[int]] = {"kv": [], "window": [], "state": []}
    for layer in range(worker.spec.num_layers):
        shape = worker.spec.attention_shape(layer)
        has_second_pool = shape is not None and shape.window and worker.plan.num_window_blocks > 0
        groups["state" if shape is None else "window" if has_second_pool else "kv"].append(layer)
    groups["kv"] += range(worker.spec.num_layers, len(worker.kv_caches))  # of an MTP head
    dtype = worker.spec.dtype
    return (
        EntryKind("kv", worker, groups["kv"], dtype),
        EntryKind("window", worker, groups["window"], dtype),
        EntryKind("state", worker, groups["state"], torch.float32),
    )


def hash_weights(worker: Worker, folder: Path) -> Any:
    if worker.config.load_format == "dummy":
        return f"dummy, seed {worker.config.seed}"
    paths = [*list_files(worker.directory)]
    if worker.has_mtp_head:
        paths += worker.directory.glob(MTP_FILE)
    return hash_files(sorted(paths), folder / "files.json")


def describe_model(engine: LLMEngine, weights: Any) -> dict[str, Any]:
    """Describe all that K/V depend on, as JSON."""
    worker = engine.executor.worker
    config = engine.config
    return {
        "format": _FORMAT,
        "transformers": transformers.__version__,
        "weights": weights,
        "config.json": (worker.directory / "config.json").read_text(),
        "options": [str(worker.spec.dtype), config.quantization, config.max_model_len],
        "layers": sorted({type(layer).__qualname__ for layer in worker.model.modules()}),
        "attention": [worker.backend.NAME, worker.device.type],
        "block_size": worker.block_size,
        "window_pool": worker.plan.num_window_blocks > 0,
    }
