"""Host memory for packed experts: one anonymous range, looked after in pieces of 1 GiB; knows no expert and no device.

One range, because a layer's records are contiguous and may exceed a piece; pieces, because advice and registration with a device are given per piece.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero.errors import DoesNotFit

PIECE_BYTES = 1 << 30
HUGE_BYTES = 2 << 20
MAP_NORESERVE = 0x4000                   # as on every Linux that Python's mmap may lack the name for
MADV_COLLAPSE = 25                       # Linux 6.1; Python's mmap has no name for it


@dataclass(frozen=True)
class Huge:
    """What was obtained: bytes in huge pages, by which advice, and why not more."""

    nbytes: int
    advice: str                          # "collapse" | "hugepage" | "none"
    note: str = ""

    def __str__(self) -> str:
        return f"{self.nbytes / 2**20:.0f} MiB of it in huge pages ({self.advice}{'; ' if self.note else ''}{self.note})"


class Arena:
    """`nbytes` of zeroed memory at a multiple of 2 MiB, not yet backed by pages. `view` gives ranges of it; they keep it alive."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        room = -(-nbytes // HUGE_BYTES) * HUGE_BYTES + HUGE_BYTES
        try:
            self.map = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        except (OSError, ValueError, OverflowError) as e:
            raise DoesNotFit(f"{nbytes / 1e9:.1f} GB of host memory for experts: {e}",
                             "a smaller --expert-format, fewer --layers, or a higher limit (ulimit -v, cgroup memory.max)") from e
        whole = np.frombuffer(self.map, np.uint8)
        self.skip = -whole.ctypes.data % HUGE_BYTES
        self.memory = whole[self.skip:self.skip + nbytes]

    def view(self, start: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], writable."""
        assert start >= 0 and start + nbytes <= self.nbytes
        return self.memory[start:start + nbytes]

    def pieces(self) -> list[tuple[int, int]]:
        """(start, nbytes) of each piece, for registration with a device. Advice must come before registration, never after."""
        return [(at, min(PIECE_BYTES, self.nbytes - at)) for at in range(0, self.nbytes, PIECE_BYTES)]

    def ask_for_huge_pages(self) -> Huge:
        """After filling: collapse each piece into huge pages; where the kernel cannot, ask for them in the background."""
        advice, note = "none", ""
        for start, nbytes in self.pieces():
            whole = nbytes // HUGE_BYTES * HUGE_BYTES
            if not whole:
                continue
            for name, number in (("collapse", MADV_COLLAPSE), ("hugepage", mmap.MADV_HUGEPAGE)):
                try:
                    self.map.madvise(number, self.skip + start, whole)
                    advice = name
                    break
                except OSError as e:
                    note = f"{name}: {os.strerror(e.errno or 0)}"
        return Huge(self.huge_bytes(), advice, note if advice != "collapse" else "")

    def huge_bytes(self) -> int:
        """Bytes of this arena that lie in huge pages now, from /proc/self/smaps."""
        first, last, total, inside = self.memory.ctypes.data, self.memory.ctypes.data + self.nbytes, 0, False
        for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
            head = line.split(maxsplit=1)[0]
            if "-" in head and ":" not in head:
                low, high = (int(v, 16) for v in head.split("-"))
                inside = low < last and high > first
            elif inside and head == "AnonHugePages:":
                total += int(line.split()[1]) * 1024
        return min(total, self.nbytes)

    def interleave(self, nodes: list[int]) -> str:
        """Spread pages over NUMA nodes (before filling). "" when done, else why not."""
        if len(nodes) < 2:
            return ""
        mask = ctypes.c_ulong(sum(1 << n for n in nodes))
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = {"x86_64": 237, "aarch64": 235}
        number = numbers.get(os.uname().machine)
        if number is None:
            return f"mbind is not known on {os.uname().machine}"
        address = ctypes.c_void_p(self.memory.ctypes.data)
        if libc.syscall(number, address, ctypes.c_ulong(-(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE), 3, ctypes.byref(mask), 64, 0):
            return f"mbind: {os.strerror(ctypes.get_errno())}"
        return ""
