"""The pages that one group of layers shares, as numbers in two tiers: which are free, held or cached; knows no token and no prefix.

A group's layers see the same window, so they can give the same pages back. A page is a number in [0, count) on the device, or in [0, host_count) in
the second tier. Every device page is free, held (by one or more tables) or cached (held by nobody, its content in the index). Cached pages are taken
again oldest first: before all others those that a window has passed, which only a prompt that departs right there can use; they are not copied out.
Every so many tokens a window is treated as if a sequence had ended there, so that a long text that loses its last pages is not lost as a whole.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

APART = 2048                             # tokens between the windows that are kept along a text


@dataclass(frozen=True, slots=True)
class Size:
    """Of one group: pages on the device and in the host tier; `window`: tokens that its layers see, the current one included, None: all."""

    count: int
    host_count: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """One page of a group moved between tiers. to_host: device page `source` -> host page `target`; else host `source` -> device `target`."""

    to_host: bool
    source: int
    target: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The state of a row of the batch kept in a mark (`keep`), or a row's state set from a mark."""

    keep: bool
    row: int
    mark: int


@dataclass(eq=False, slots=True)
class Entry:
    """What one indexed page holds: the bytes of its int32 tokens, after the prefix `parent`. page and host by group, and mark, are -1 where there is
    no copy."""

    digest: bytes
    parent: bytes
    tokens: bytes
    page: list[int]
    host: list[int]
    mark: int = -1

    def kept(self, group: int) -> bool:
        return self.page[group] >= 0 or self.host[group] >= 0

    @property
    def gone(self) -> bool:
        return max(self.page) < 0 and max(self.host) < 0


class Pool:
    """`gone` hears of an entry that has lost its last copy here; copies are ordered in `pending`."""

    def __init__(self, group: int, size: Size, page_size: int, pending: deque[Copy | StateCopy], gone: Callable[[Entry], None]) -> None:
        if size.count < 1 or page_size < 1 or size.host_count < 0:
            raise ValueError(f"pages: count {size.count}, page_size {page_size}, host_count {size.host_count}")
        self.group, self.count, self.host_count, self.window, self.page_size = group, size.count, size.host_count, size.window, page_size
        self.pending, self.gone = pending, gone
        self.refs = [0] * size.count
        self.free = list(range(size.count - 1, -1, -1))
        self.passed: OrderedDict[int, Entry] = OrderedDict()       # device pages held by nobody, oldest first: behind a window
        self.cached: OrderedDict[int, Entry] = OrderedDict()       # and where a sequence ended
        self.entry: dict[int, Entry] = {}                          # device page -> what it holds, when indexed
        self.host_free = list(range(size.host_count - 1, -1, -1))
        self.host_used: OrderedDict[int, Entry] = OrderedDict()    # host pages, oldest first

    @property
    def available(self) -> int:
        """Pages that can be taken now: free ones and cached ones."""
        return len(self.free) + len(self.passed) + len(self.cached)

    def need(self, tokens: int, chunk: int) -> int:
        """Most pages a sequence of `tokens` holds at once when it is written `chunk` tokens at a time."""
        whole, size = -(-tokens // self.page_size), self.page_size
        return whole if self.window is None else min(whole, -(-(self.window - 1) // size) - (-(chunk + size - 1) // size))

    def first(self, tokens: int) -> int:
        """First page that the token at position `tokens` can see."""
        return 0 if self.window is None else max(0, tokens - self.window + 1) // self.page_size

    def milestone(self, page: int) -> bool:
        """Whether the page that is a text's `page`-th is in a window that is kept along it."""
        return self.first(-(-(page + 1) * self.page_size // APART) * APART) <= page

    def new(self) -> int | None:
        """A page held once, with nothing in it."""
        if not self.free and not self._evict():
            return None
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def reserve(self, entry: Entry) -> None:
        """Keeps what is here of an entry that is about to be taken from being evicted for the others."""
        page, host = entry.page[self.group], entry.host[self.group]
        if page >= 0:
            if self.refs[page] == 0:
                del (self.passed if page in self.passed else self.cached)[page]
            self.refs[page] += 1
        elif host >= 0:
            self.host_used.move_to_end(host)

    def fetch(self, entry: Entry) -> bool:
        """Brings a host page back to a device page, held once."""
        source = entry.host[self.group]
        page = self.new() if source >= 0 else None
        if page is None:
            return False
        if entry.host[self.group] != source:     # its own host page was evicted to make room
            self.refs[page] = 0
            self.free.append(page)
            return False
        self.file(entry, page)
        self.pending.append(Copy(False, source, page, self.group))
        return True

    def file(self, entry: Entry, page: int) -> None:
        """`page` holds what `entry` says."""
        entry.page[self.group], self.entry[page] = page, entry

    def drop(self, page: int, forget: bool = False, passed: bool = False) -> None:
        """Gives one hold of a page back. forget: nobody may find it; passed: a window went on, and its sequence goes on without it."""
        assert self.refs[page] > 0, f"page {page} given back twice"
        self.refs[page] -= 1
        if self.refs[page]:
            return
        entry = self.entry.get(page)
        if entry is not None and forget:
            self._leave(entry)
            if entry.host[self.group] >= 0:
                self._leave_host(entry)
            entry = None
        if entry is None:
            self.free.append(page)
        else:
            (self.passed if passed else self.cached)[page] = entry

    def _evict(self) -> bool:
        """Frees the page that nobody has used for longest, after ordering its copy to the host tier where there is one."""
        passed = bool(self.passed)
        if not self.available:
            return False
        page, entry = (self.passed if passed else self.cached).popitem(last=False)
        if self.host_count and not passed and entry.host[self.group] < 0:
            if not self.host_free:
                self._leave_host(next(iter(self.host_used.values())))
            entry.host[self.group] = self.host_free.pop()
            self.pending.append(Copy(True, page, entry.host[self.group], self.group))
        if entry.host[self.group] >= 0:
            self.host_used[entry.host[self.group]] = entry
            self.host_used.move_to_end(entry.host[self.group])
        self._leave(entry)
        self.free.append(page)
        return True

    def _leave(self, entry: Entry) -> None:
        """Takes an entry off its device page."""
        del self.entry[entry.page[self.group]]
        entry.page[self.group] = -1
        if entry.gone:
            self.gone(entry)

    def _leave_host(self, entry: Entry) -> None:
        del self.host_used[entry.host[self.group]]
        self.host_free.append(entry.host[self.group])
        entry.host[self.group] = -1
        if entry.gone:
            self.gone(entry)

    def clear(self) -> None:
        """Forgets every page that nobody holds, in both tiers."""
        for entry in list(self.host_used.values()):
            self._leave_host(entry)
        for unheld in (self.passed, self.cached):
            for page, entry in list(unheld.items()):
                del unheld[page]
                self._leave(entry)
                self.free.append(page)

    def check(self, lines: Iterable[tuple[list[int], int]]) -> None:
        """Raises AssertionError when a page is leaked, doubly owned or misfiled. `lines`: pages and how many were given back, of all open tables."""
        holds = [0] * self.count
        for pages, retired in lines:
            assert all(p < 0 for p in pages[:retired]) and all(p >= 0 for p in pages[retired:])
            live = [p for p in pages if p >= 0]
            assert len(set(live)) == len(live), f"a table holds a page twice: {live}"
            for page in live:
                holds[page] += 1
        assert holds == self.refs, f"references {self.refs} but tables hold {holds}"
        free = set(self.free)
        assert len(free) == len(self.free)
        for page in range(self.count):
            where = (page in self.cached) + (page in self.passed) + (holds[page] > 0)
            assert (page in free) == (where == 0) and where < 2, f"page {page} is in {where} places"
            assert page not in self.entry or page not in free, f"free page {page} is indexed"
        assert all(self.entry.get(p) is e for unheld in (self.passed, self.cached) for p, e in unheld.items())
        assert all(e.page[self.group] == p for p, e in self.entry.items())
        assert all(e.host[self.group] == h for h, e in self.host_used.items())
        assert sorted([*self.host_free, *self.host_used]) == list(range(self.host_count))
