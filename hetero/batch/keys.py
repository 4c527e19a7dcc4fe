"""Sets of rows as arrays: 16 bytes a row, so that a million cost 16 MB; knows digests alone."""

from collections.abc import Iterable

import numpy as np


class Keys:
    """Digests in the order they came."""

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._bytes = bytearray()
        for digest in digests:
            self.add(digest)

    def add(self, digest: bytes) -> None:
        assert len(digest) == 16
        self._bytes += digest

    def replace(self, at: int, digest: bytes) -> None:
        self._bytes[16 * at:16 * at + 16] = digest

    @classmethod
    def union(cls, *parts: "Keys") -> "Keys":
        found = cls()
        for part in parts:
            found._bytes += part._bytes
        return found

    def at(self, place: int) -> bytes:
        return bytes(self._bytes[16 * place:16 * place + 16])

    def __len__(self) -> int:
        return len(self._bytes) // 16

    @property
    def halves(self) -> np.ndarray:
        """[n, 2] uint64, a view."""
        return np.frombuffer(self._bytes, "<u8").reshape(-1, 2)

    def first(self) -> np.ndarray:
        """[n] int64: where each digest came first; its own place when it is new there."""
        halves, n = self.halves, len(self)
        order = np.lexsort((np.arange(n), halves[:, 1], halves[:, 0]))
        same = np.zeros(n, bool)
        if n:
            ordered = halves[order]
            same[1:] = (ordered[1:] == ordered[:-1]).all(1)
        starts = np.maximum.accumulate(np.where(same, 0, np.arange(n)))
        found = np.empty(n, np.int64)
        found[order] = order[starts]
        return found

    def within(self, others: "Keys") -> np.ndarray:
        """[n] bool: which of these are among `others`."""
        if not len(self) or not len(others):
            return np.zeros(len(self), bool)
        mine, theirs = (np.ascontiguousarray(k.halves).view("S16").ravel() for k in (self, others))
        return np.isin(mine, theirs)
