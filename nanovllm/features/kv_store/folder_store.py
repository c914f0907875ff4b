"""A store in a folder, which survives the engine and which engines share.

    kv_cache_dir/
        files.json                hashes of weight files, so that each file is read once
        9f0c.../                  the hash of all that K/V depend on
            model.json              the same, to read
            root                    where the hash chains of these blocks start
            57d1....kv              an entry in safetensors' format, with its tokens and a checksum

A changed model finds nothing old, because it has another subfolder. The root is random and known
only to those who can read the folder, so clients cannot prepare hash collisions. A subfolder and an
entry get their names when they are complete, by a rename. If a machine fails before the content is
on the disk, the checksum differs. Engines therefore need no lock: the same entry may be written
twice, and a file that is deleted while it is read stays readable.

Entries are written by a thread of their own. If the disk is slower than the engine, entries are
dropped. If it is full, or the folder is gone, a line says so and the engine serves on.
"""

import json
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree
from threading import Lock
from typing import Any
from uuid import uuid4

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.features.kv_store.tensors import Entry
from nanovllm.utils.helpers import read_json, report

_MAX_QUEUED_BYTES = 1 << 30
_SECONDS_OF_A_WRITE = 3600  # a temporary file that is older belongs to a process that has died


class FolderStore:
    """Entries of one model. `num_bytes` limits all entries of the folder, of any engine.

    Raises OSError if the folder cannot be made or read.
    """

    def __init__(self, folder: Path, num_bytes: int, model: Mapping[str, Any]) -> None:
        """`model` has all that K/V depend on, as JSON."""
        description = json.dumps(model, indent=1)
        name = blake2b(description.encode(), digest_size=16).hexdigest()
        self.folder = folder
        self.subfolder = folder / name
        self.num_bytes = num_bytes
        if not self.subfolder.exists():
            self._make_subfolder(description)
        self.root_hash = int((self.subfolder / "root").read_text(), 16)
        self.queued: dict[str, Entry] = {}  # entries that are not written yet
        self.num_queued_bytes = 0
        self.lock = Lock()  # protects both, which the writer changes
        self.num_written_bytes = num_bytes  # since the last eviction: the first write evicts
        self.has_reported = False
        self.writer = ThreadPoolExecutor(1, "kv_store")

    def _make_subfolder(self, description: str) -> None:
        temporary = self.folder / f"{uuid4().hex}.tmp"
        temporary.mkdir(mode=0o700)
        (temporary / "model.json").write_text(description)
        (temporary / "root").write_text(secrets.token_hex(16))
        try:
            temporary.rename(self.subfolder)
        except OSError:  # another engine has made it
            rmtree(temporary)

    def get(self, key: str, token_ids: list[int]) -> Entry | None:
        """Return the entry for a block with these tokens, or None. Delete a damaged file."""
        with self.lock:
            entry = self.queued.get(key)
        if entry is None:
            path = self.subfolder / key
            try:
                entry = read_entry(path)
            except FileNotFoundError:
                return None
            except (OSError, SafetensorError, ValueError, KeyError) as error:
                self._report(error)
                with suppress(OSError):  # others may own the file
                    path.unlink(missing_ok=True)
                return None
            with suppress(OSError):
                touch(path)
        elif not entry.is_finite():
            return None
        return entry if entry.token_ids == token_ids else None

    def put(self, key: str, entry: Entry) -> None:
        """Let the thread write an entry."""
        with self.lock:
            if self.num_queued_bytes + entry.content.nbytes > _MAX_QUEUED_BYTES:
                return
            self.queued[key] = entry
            self.num_queued_bytes += entry.content.nbytes
        self.writer.submit(self._write, key, entry)

    def keep(self, key: str) -> bool:
        """Return whether the store has an entry, which becomes the most recently used one."""
        with self.lock:
            if key in self.queued:
                return True
        try:
            touch(self.subfolder / key)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Wait until all entries are written."""
        self.writer.shutdown()

    def _write(self, key: str, entry: Entry) -> None:
        temporary = self.subfolder / f"{uuid4().hex}.tmp"  # no other process has this name
        try:
            if entry.is_finite():
                num_bytes = entry.content.nbytes
                self.num_written_bytes += num_bytes
                # The folder has room for this share of the limit, and for this entry.
                room = self.num_bytes // 16
                if self.num_written_bytes > room:
                    self._evict(self.num_bytes - room - 2 * num_bytes)
                    self.num_written_bytes = 0
                write_entry(temporary, entry)
                touch(temporary)
                temporary.replace(self.subfolder / key)
        except (OSError, SafetensorError) as error:
            self._report(error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        finally:
            with self.lock:
                self.queued.pop(key, None)
                self.num_queued_bytes -= entry.content.nbytes

    def _evict(self, num_bytes: int) -> None:
        """Delete the least recently used entries, of any model, until `num_bytes` are left."""
        found: list[tuple[int, int, Path]] = []
        for path in self.folder.glob("*/*.*"):
            with suppress(OSError):  # another engine has deleted it
                stat = path.stat()
                if path.suffix == ".tmp" and stat.st_mtime < time.time() - _SECONDS_OF_A_WRITE:
                    path.unlink()
                elif path.suffix != ".json":
                    found.append((stat.st_mtime_ns, stat.st_size, path))
        surplus = sum([size for _, size, _ in found]) - num_bytes
        for _, size, path in sorted(found):
            if surplus <= 0:
                break
            path.unlink(missing_ok=True)
            surplus -= size

    def _report(self, error: Exception) -> None:
        """Report the first problem. The others are mostly the same."""
        if not self.has_reported:
            self.has_reported = True
            report(f"kv_cache_dir: {self.subfolder} cannot keep or return K/V: {error}")


def touch(path: Path) -> None:
    """Make a file the most recently used one. The system's own clock has steps of milliseconds."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def write_entry(path: Path, entry: Entry) -> None:
    facts = {
        "token_ids": json.dumps(entry.token_ids),
        "checksum": find_checksum(entry.content),
    }
    save_file({"content": entry.content}, path, facts)


def read_entry(path: Path) -> Entry:
    """Raises SafetensorError or ValueError for a damaged file."""
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
        content = file.get_tensor("content")
    if facts["checksum"] != find_checksum(content):
        raise ValueError(f"{path}: the checksum differs")
    return Entry(json.loads(facts["token_ids"]), content)


def find_checksum(content: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(content.view(torch.uint8).numpy().data)


def hash_files(paths: list[Path], known_hashes: Path) -> dict[str, str]:
    """Return a hash of the content of each file, by name.

    `known_hashes` is a file that keeps them by path, size and time, because reading takes 0.1 s for
    each GB.
    """
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = read_json(known_hashes)
    hashes: dict[str, str] = {}
    is_new = False
    for path in paths:
        stat = path.stat()
        key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        if key not in known:
            is_new = True
            digest = xxhash.xxh3_128()
            with path.open("rb") as file:
                while piece := file.read(1 << 24):
                    digest.update(piece)
            known[key] = digest.hexdigest()
        hashes[path.name] = known[key]
    if is_new:
        temporary = known_hashes.with_name(f"{uuid4().hex}.tmp")
        temporary.write_text(json.dumps(known, indent=1))
        temporary.replace(known_hashes)
    return hashes
