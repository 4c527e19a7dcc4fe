"""The output files of a batch as journals: whole lines appended in groups, one write and one fsync each, a torn end cut off; knows no model.

A line's custom_id (or line number) in either file says that its row is finished; nothing else remembers progress.
"""

import fcntl
import heapq
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hetero.batch.keys import Keys
from hetero.batch.rows import key_of
from hetero.errors import BadOption, NotWritable

GROUP_ROWS, GROUP_BYTES, GROUP_S = 256, 4 << 20, 0.5


DUPLICATE = "duplicate_id"               # code of rows that are known by their line, as their id is another's


def key_of_output(found: dict[str, Any]) -> bytes:
    """The key of the row that an output line is about."""
    id, error = found["custom_id"], found["error"]
    by_line = id is None or (error is not None and error["code"] == DUPLICATE)
    return key_of(None, error["line"]) if by_line else key_of(id, 0)


def encode(line: dict[str, Any]) -> bytes:
    """An output line; a lone surrogate stays the escape that it came as."""
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"


class Journal:
    """One file of lines. Opening locks it, cuts a torn end off and reads which rows it has; raises NotWritable or BadOption."""

    def __init__(self, path: Path) -> None:
        self.path, self.keys = path, Keys()
        try:
            if path.exists() and not path.is_file():
                raise BadOption(f"{path}: no regular file, so nothing could be resumed from it", "give a path on a disk")
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                raise BadOption(f"{path}: another process is writing it", "wait for it, or give another -o") from None
            self.size = self._repair()
            os.lseek(self._fd, self.size, os.SEEK_SET)
        except OSError as e:
            raise self._unwritable(e) from e

    def _unwritable(self, e: OSError) -> NotWritable:
        return NotWritable(f"{self.path}: {e.strerror or e}; what was finished before is kept ({len(self.keys)} rows)",
                           "make room or make it writable, then run again with --resume")

    def _repair(self) -> int:
        """Bytes of whole lines. A torn line, and after a power cut lines of zeros, can only stand at the end; anything else is not ours to cut."""
        good, torn = 0, 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("torn")
                    found = json.loads(line)
                    key = key_of_output(found)
                except (ValueError, KeyError, TypeError):
                    torn = torn or number
                    continue
                if torn:
                    raise BadOption(f"{self.path}: line {torn} is no line of a batch's output", "repair or remove it, or give another -o")
                self.keys.add(key)
                good += len(line)
        if torn:
            os.ftruncate(self._fd, good)
            os.fsync(self._fd)
        return good

    def append(self, lines: list[bytes], keys: Iterable[bytes]) -> None:
        """Writes whole lines. When the disk is full: as many whole ones as fit stay, and NotWritable is raised."""
        data, at = b"".join(lines), 0
        try:
            while at < len(data):
                at += os.write(self._fd, memoryview(data)[at:])
            os.fsync(self._fd)
        except OSError as e:
            kept = data.rfind(b"\n", 0, at) + 1
            os.ftruncate(self._fd, self.size + kept)
            self.size += kept
            for key in list(keys)[:data.count(b"\n", 0, kept)]:
                self.keys.add(key)
            raise self._unwritable(e) from e
        self.size += len(data)
        for key in keys:
            self.keys.add(key)

    def close(self) -> None:
        os.close(self._fd)


def sync_folder(folder: Path) -> None:
    """Makes a rename or a new file in it last."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Sink:
    """Where finished rows go: good ones to one journal, the others to the second, in the order they come or (`in_order`) in that of their turns.

    Rows wait until a group is written; with `in_order` they also wait for earlier turns, and `ahead` tells how far one may run ahead.
    """

    def __init__(self, good: Journal, bad: Journal, in_order: bool, first: int = 0) -> None:
        self.good, self.bad, self.in_order, self.next = good, bad, in_order, first
        self._waiting: list[tuple[int, bool, bytes, bytes]] = []     # heap by turn, in_order alone
        self._groups: dict[bool, list[tuple[bytes, bytes]]] = {True: [], False: []}
        self._bytes, self._since = 0, time.monotonic()

    def put(self, turn: int, key: bytes, data: bytes, good: bool) -> None:
        """A finished row; `data` is its encoded line."""
        if not self.in_order:
            self._take(good, key, data)
        else:
            heapq.heappush(self._waiting, (turn, good, key, data))
            self._pass_on()
        if self._bytes >= GROUP_BYTES or sum(map(len, self._groups.values())) >= GROUP_ROWS:
            self.flush()

    def skip(self, turn: int) -> None:
        """A turn that was finished before."""
        if self.in_order:
            heapq.heappush(self._waiting, (turn, False, b"", b""))
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting and self._waiting[0][0] == self.next:
            _, good, key, data = heapq.heappop(self._waiting)
            self.next += 1
            if data:
                self._take(good, key, data)

    def _take(self, good: bool, key: bytes, data: bytes) -> None:
        self._groups[good].append((key, data))
        self._bytes += len(data)

    def tick(self) -> None:
        """Writes a group that has waited long enough."""
        if self._bytes and time.monotonic() - self._since > GROUP_S:
            self.flush()

    def flush(self) -> None:
        self._since, self._bytes = time.monotonic(), 0
        for good, journal in ((True, self.good), (False, self.bad)):
            group, self._groups[good] = self._groups[good], []
            if group:
                journal.append([data for _, data in group], [key for key, _ in group])

    def close(self) -> None:
        """Writes what is complete; with `in_order`, rows behind a gap are computed again on resume."""
        self.flush()
        self.good.close()
        self.bad.close()
