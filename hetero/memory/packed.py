"""Packed experts on disk, so that a second start only reads; knows files and bytes, not how weights are packed.

One file per (weights, formats, packing): a JSON header padded to a page, the arena's bytes, a trailer. Written beside its name, flushed, renamed;
a file without its trailer or of another size is torn and ignored.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetero.errors import BadOption

MAGIC, TRAILER, PAGE, CHUNK = b"hetero packed 1\n", b"hetero packed end", 4096, 64 << 20
Progress = Callable[[str, int, int], None]   # what is going on, bytes done, bytes in all


@dataclass(frozen=True)
class Entry:
    """One file of the cache. `whole` False: torn, or left behind by a process that ended."""

    path: Path
    key: str
    model: str
    formats: str
    of: str                              # names the weights it was packed from; the same for every packing of them
    nbytes: int
    used_at: float                       # seconds since the epoch
    whole: bool


def place(cache_dir: Path) -> Path:
    return cache_dir / "packed"


def header_of(path: Path) -> tuple[dict[str, Any], int] | None:
    """The header and where the data begins; None when the file is torn or not ours."""
    try:
        with path.open("rb") as f:
            if f.read(len(MAGIC)) != MAGIC:
                return None
            length = int.from_bytes(f.read(8), "little")
            if length > 64 << 20:
                return None
            header = json.loads(f.read(length))
            start = -(-(len(MAGIC) + 8 + length) // PAGE) * PAGE
            f.seek(start + header["nbytes"])
            return (header, start) if f.read() == TRAILER else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read(cache_dir: Path, key: str, memory: np.ndarray, threads: int, progress: Progress) -> dict[str, Any] | None:
    """Fill `memory` (uint8, the whole arena) from the file of this key. Its header, or None when there is no whole one."""
    path = place(cache_dir) / f"{key}.packed"
    found = header_of(path)
    if found is None or found[0]["nbytes"] != memory.nbytes or found[0]["key"] != key:
        return None
    header, start = found
    fd = os.open(path, os.O_RDONLY)
    try:
        def fetch(at: int) -> int:
            end = min(at + CHUNK, memory.nbytes)
            first = at
            while at < end:
                got = os.preadv(fd, [memory[at:end].data], start + at)
                if not got:
                    return -1
                at += got
            os.posix_fadvise(fd, start + first, end - first, os.POSIX_FADV_DONTNEED)
            return end - first

        done = 0
        with ThreadPoolExecutor(threads) as pool:
            for got in pool.map(fetch, range(0, memory.nbytes, CHUNK)):
                if got < 0:
                    return None
                done += got
                progress("reading packed experts", done, memory.nbytes)
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):   # a read-only cache: only the order of `prune` suffers
        os.utime(path)
    return header


def write(cache_dir: Path, key: str, memory: np.ndarray, header: dict[str, Any], progress: Progress) -> str:
    """Keep the arena's bytes under this key. "" when done, else why not: a cache that cannot be written is no reason not to run."""
    folder = place(cache_dir)
    temporary = folder / f"{key}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free, need = shutil.disk_usage(folder).free, memory.nbytes + memory.nbytes // 50 + (64 << 20)
        if free < need:
            return f"{folder}: {need / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"
        text = json.dumps(header | {"key": key, "nbytes": memory.nbytes}).encode()
        start = -(-(len(MAGIC) + 8 + len(text)) // PAGE) * PAGE
        try:
            with temporary.open("wb", buffering=0) as f:
                write_all(f.fileno(), (MAGIC + len(text).to_bytes(8, "little") + text).ljust(start, b"\0"))
                for at in range(0, memory.nbytes, CHUNK):
                    write_all(f.fileno(), memory[at:at + CHUNK].data)
                    os.fdatasync(f.fileno())
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    progress("writing packed experts", min(at + CHUNK, memory.nbytes), memory.nbytes)
                write_all(f.fileno(), TRAILER)
                os.fsync(f.fileno())
            temporary.replace(folder / f"{key}.packed")
            for e in entries(cache_dir):         # what older code packed from the same weights is never read again
                if e.key != key and e.of == header["of"] and e.formats == header["formats"]:
                    e.path.unlink(missing_ok=True)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        return f"{folder}: {e.strerror}"
    return ""


def write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def entries(cache_dir: Path) -> list[Entry]:
    """Everything in the cache, most recently used first."""
    found = []
    for path in sorted(place(cache_dir).glob("*")):
        if path.suffix not in (".packed", ".tmp"):
            continue
        stat, head = path.stat(), header_of(path) if path.suffix == ".packed" else None
        h = head[0] if head else {}
        found.append(Entry(path, path.name.split(".")[0], h.get("model", "?"), h.get("formats", "?"), h.get("of", ""),
                           stat.st_size, stat.st_mtime, head is not None))
    return sorted(found, key=lambda e: -e.used_at)


def remove(cache_dir: Path, names: list[str]) -> list[Entry]:
    """Remove the entries whose key begins with, or whose model is, one of these names. BadOption names what matches nothing."""
    all_entries = entries(cache_dir)
    gone: list[Entry] = []
    for name in names:
        matched = [e for e in all_entries if e.model == name or (len(name) >= 4 and e.key.startswith(name))]
        if not matched:
            raise BadOption(f"nothing in {place(cache_dir)} is called {name!r}", "see `hetero cache list`; a key may be cut to four letters or more")
        gone += [e for e in matched if e not in gone]
    for e in gone:
        e.path.unlink(missing_ok=True)
    return gone


def prune(cache_dir: Path, keep_bytes: int | None = None, unused_s: float | None = None) -> list[Entry]:
    """Remove torn files and those of ended processes; then what was not used for `unused_s`, and the least recently used above `keep_bytes`."""
    gone, kept_bytes, now = [], 0, time.time()
    for e in entries(cache_dir):
        if not e.whole:
            drop = e.path.suffix == ".packed" or not Path(f"/proc/{e.path.name.split('.')[1]}").exists()
        else:
            drop = (unused_s is not None and now - e.used_at > unused_s) or (keep_bytes is not None and kept_bytes + e.nbytes > keep_bytes)
            kept_bytes += 0 if drop else e.nbytes
        if drop:
            e.path.unlink(missing_ok=True)
            gone.append(e)
    return gone
