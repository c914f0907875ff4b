"""A store in the memory of this process."""

from collections import OrderedDict

from nanovllm.features.kv_store.tensors import Entry


class RamStore:
    """Entries by their keys, of at most `num_bytes`. The least recently used ones are evicted."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_used_bytes = 0
        self.entries = OrderedDict[str, Entry]()  # least recently used first

    def get(self, key: str, token_ids: list[int]) -> Entry | None:
        """Return the entry for a block with these tokens, or None."""
        entry = self.entries.get(key)
        if entry is None or entry.token_ids != token_ids:
            return None
        if not entry.is_finite():
            self._remove(key)
            return None
        self.entries.move_to_end(key)
        return entry

    def put(self, key: str, entry: Entry) -> None:
        self.entries[key] = entry
        self.num_used_bytes += entry.content.nbytes
        while self.num_used_bytes > self.num_bytes:
            self._remove(next(iter(self.entries)))

    def keep(self, key: str) -> bool:
        """Return whether the store has an entry, which becomes the most recently used one."""
        if key not in self.entries:
            return False
        self.entries.move_to_end(key)
        return True

    def close(self) -> None:
        """Release all entries."""
        self.entries.clear()
        self.num_used_bytes = 0

    def _remove(self, key: str) -> None:
        self.num_used_bytes -= self.entries.pop(key).content.nbytes
