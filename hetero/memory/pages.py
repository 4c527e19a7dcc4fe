"""KV pages as numbers: who holds which page, which exact tokens a page holds, and what must be copied between tiers; knows no tensor.

A page is a number in [0, count) on the device, or in [0, host_count) in the second tier. Every device page is free, held (by one or more
tables) or cached (held by nobody, but its content is in the index and may be taken again). A page enters the index only when it is full and
its owner's step succeeded (`commit`); the index is keyed by a chain of BLAKE2b digests, one per page, and a hit is verified token by token.

Models that keep a state per sequence can only go on from a place where the state was kept: a mark, one of `marks` state slots tied to an indexed
page. Each sequence keeps the mark of its prompt's last full page, and a second one that moves along with it.

Copies between tiers, and of states, are data (`pending`): whoever owns the memory runs and removes them, in order, before the next step writes.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

GHOSTS = 65_536                          # digests remembered after eviction, to tell "evicted" from "never seen"


@dataclass(frozen=True, slots=True)
class Copy:
    """One page moved between tiers. to_host: device page `source` -> host page `target`; else host `source` -> device `target`."""

    to_host: bool
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The state of a row of the batch kept in a mark (`keep`), or a row's state set from a mark."""

    keep: bool
    row: int
    mark: int


@dataclass(eq=False, slots=True)
class Entry:
    """What one indexed page holds: the bytes of its int32 tokens, after the prefix `parent`. page, host or mark is -1 where there is no copy."""

    digest: bytes
    parent: bytes
    tokens: bytes
    page: int = -1
    host: int = -1
    mark: int = -1


@dataclass(eq=False, slots=True)
class Table:
    """The pages of one sequence in order (-1: given back), and the digests of its full pages as far as they were needed.

    `salt` separates namespaces: equal tokens under different salts never share; a nonzero salt's entries die with the last table that holds them.
    """

    salt: int = 0
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    committed: int = 0                   # full pages already offered to the index
    retired: int = 0                     # leading pages given back
    moving: Entry | None = None          # holder of the mark that moves along

    @property
    def root(self) -> bytes:
        return self.salt.to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt is in the index: `tokens` (a multiple of the page size), the entries needed, and why no more (None: all of it)."""

    tokens: int
    first: int                           # first page that is needed; earlier ones lie outside every window
    entries: tuple[Entry, ...]
    miss: str | None


class Pages:
    """All pages of one cache. `window`: tokens that any layer sees, or None when some layer sees everything; `marks`: state slots to go on from,
    None for a model without states."""

    def __init__(self, count: int, page_size: int, host_count: int = 0, window: int | None = None, marks: int | None = None) -> None:
        if count < 1 or page_size < 1 or host_count < 0:
            raise ValueError(f"pages: count {count}, page_size {page_size}, host_count {host_count}")
        self.marks = marks
        self.mark_free = list(range((marks or 0) - 1, -1, -1))
        self.marked: OrderedDict[int, Entry] = OrderedDict()       # marks in use, oldest first
        self.count, self.page_size, self.host_count, self.window = count, page_size, host_count, window
        self.refs = [0] * count
        self.free = list(range(count - 1, -1, -1))
        self.cached: OrderedDict[int, Entry] = OrderedDict()       # device pages held by nobody, oldest first
        self.entry: dict[int, Entry] = {}                          # device page -> what it holds, when indexed
        self.index: dict[bytes, Entry] = {}
        self.children: dict[bytes, list[Entry]] = {}               # parent digest -> entries, to say where a prompt departs
        self.host_free = list(range(host_count - 1, -1, -1))
        self.host_used: OrderedDict[int, Entry] = OrderedDict()    # host pages, oldest first
        self.ghosts: OrderedDict[bytes, None] = OrderedDict()
        self.pending: deque[Copy | StateCopy] = deque()

    @property
    def available(self) -> int:
        """Pages that can be taken now: free ones and cached ones."""
        return len(self.free) + len(self.cached)

    @property
    def held(self) -> int:
        return self.count - self.available

    def need(self, tokens: int, chunk: int) -> int:
        """Most pages a sequence of `tokens` holds at once when it is written `chunk` tokens at a time."""
        whole = -(-tokens // self.page_size)
        return whole if self.window is None else min(whole, -(-(self.window + chunk) // self.page_size) + 1)

    def _chain(self, table: Table, tokens: np.ndarray, full: int) -> None:
        """Extends `table.digests` to `full` pages of `tokens` (int32)."""
        parent = table.digests[-1] if table.digests else table.root
        for j in range(len(table.digests), full):
            parent = blake2b(parent + tokens[j * self.page_size:(j + 1) * self.page_size].tobytes(), digest_size=16).digest()
            table.digests.append(parent)

    def _find(self, table: Table, tokens: np.ndarray, j: int) -> Entry | None:
        entry = self.index.get(table.digests[j])
        if entry is None or entry.tokens != tokens[j * self.page_size:(j + 1) * self.page_size].tobytes():
            return None
        return entry if entry.parent == (table.digests[j - 1] if j else table.root) else None

    def _first(self, tokens: int) -> int:
        """First page that the token at position `tokens` can see."""
        return 0 if self.window is None else max(0, tokens - self.window + 1) // self.page_size

    def match(self, table: Table, tokens: np.ndarray, limit: int) -> Match:
        """The longest indexed prefix of `tokens` (int32) of at most `limit` tokens; changes nothing but the digests of `table`."""
        full = min(limit, len(tokens)) // self.page_size
        self._chain(table, tokens, full)
        found: list[Entry | None] = []
        for j in range(full):
            entry = self._find(table, tokens, j)
            if entry is None and self.window is None:
                break
            found.append(entry)
        run = best = first = reach = 0
        for j, entry in enumerate(found):
            run = run + 1 if entry else 0
            start = self._first((j + 1) * self.page_size)
            if entry and run >= j + 1 - start:
                reach = j + 1
                if self.marks is None or entry.mark >= 0:
                    best, first = j + 1, start
        entries = tuple(e for e in found[first:best] if e)
        miss = self._miss(table, tokens, best, full) if reach == best else f"state_not_rewindable@tok {best * self.page_size}"
        return Match(best * self.page_size, first, entries, miss)

    def _miss(self, table: Table, tokens: np.ndarray, best: int, full: int) -> str | None:
        if best == full:
            return None
        at = best * self.page_size
        if table.digests[best] in self.ghosts or table.digests[best] in self.index:      # in the index: an earlier page is gone
            return f"evicted@tok {at}"
        page = tokens[at:at + self.page_size]
        rivals = self.children.get(table.digests[best - 1] if best else table.root, ())
        common = [int((np.frombuffer(e.tokens, np.int32) == page).cumprod().sum()) for e in rivals[:64]]
        return f"prefix_mismatch@tok {at + max(common)}" if common else f"not_cached@tok {at}"

    def shared(self, match: Match) -> int:
        """How many pages of `match` others hold now: taking those costs nothing of `available`."""
        return sum(e.page >= 0 and self.refs[e.page] > 0 for e in match.entries)

    def take(self, table: Table, match: Match, row: int = 0) -> int:
        """Gives `table` (empty) the pages of `match` by reference, with copies back from the host where needed, and `row` its state; returns the
        tokens obtained.

        Fewer than matched when a tier runs out of pages on the way.
        """
        assert not table.pages, "a table takes a match once"
        table.pages = [-1] * match.first
        table.retired = match.first
        for entry in reversed(match.entries):    # hold what is here before anything is evicted to make room
            if entry.page >= 0:
                self._hold(entry.page)
            elif entry.host >= 0:
                self.host_used.move_to_end(entry.host)
        for i, entry in enumerate(match.entries):
            if entry.page < 0 and not self._fetch(entry):
                for later in match.entries[i:]:
                    if later.page >= 0:
                        self._drop(later.page)
                if self.window is not None or self.marks is not None:      # part of a window, or pages without their state, are of no use
                    self.close(table)
                    return 0
                break
            table.pages.append(entry.page)
        table.committed = len(table.pages)
        if self.marks is not None and match.entries:
            self.pending.append(StateCopy(False, row, match.entries[-1].mark))
            self.marked.move_to_end(match.entries[-1].mark)
        return len(table.pages) * self.page_size

    def _fetch(self, entry: Entry) -> bool:
        """Brings a host page back to a device page, held once."""
        source = entry.host
        page = self._new() if source >= 0 else None
        if page is None:
            return False
        if entry.host != source:                 # its own host page was evicted to make room
            self.refs[page] = 0
            self.free.append(page)
            return False
        entry.page, self.entry[page] = page, entry
        self.pending.append(Copy(False, source, page))
        return True

    def extend(self, table: Table, tokens: int) -> bool:
        """Grows `table` to hold `tokens` tokens. False, and nothing changed, when there are not enough pages."""
        short = -(-tokens // self.page_size) - len(table.pages)
        if short > self.available:
            return False
        for _ in range(short):
            page = self._new()
            assert page is not None
            table.pages.append(page)
        return True

    def commit(self, table: Table, tokens: np.ndarray, computed: int) -> None:
        """Offers the full pages among the first `computed` tokens to the index: their KV is written and known to be good."""
        full = computed // self.page_size
        if full <= table.committed:
            return
        self._chain(table, tokens, full)
        for j in range(table.committed, full):
            page, digest = table.pages[j], table.digests[j]
            if page < 0:
                continue
            entry = self.index.get(digest)
            if entry is None:
                parent = table.digests[j - 1] if j else table.root
                entry = Entry(digest, parent, tokens[j * self.page_size:(j + 1) * self.page_size].tobytes())
                self.index[digest] = entry
                self.children.setdefault(parent, []).append(entry)
                self.ghosts.pop(digest, None)
            elif entry.page >= 0 or self._find(table, tokens, j) is None:      # a twin got there first, or a digest collided
                continue
            entry.page, self.entry[page] = page, entry
        table.committed = full

    def keep(self, table: Table, tokens: np.ndarray, computed: int, row: int, moving: bool) -> None:
        """Keeps the state of `row` after `computed` tokens, when they end a page that is in the index. moving: instead of the last such mark of
        this table, so that a sequence never takes more than one of those."""
        if not self.marks or computed % self.page_size:
            return
        entry = self._find(table, tokens, computed // self.page_size - 1)
        if entry is None or entry.mark >= 0:
            return
        if moving and table.moving is not None and table.moving.mark >= 0:
            self._unmark(table.moving)
        if not self.mark_free:
            self._unmark(next(iter(self.marked.values())))
        entry.mark = self.mark_free.pop()
        self.marked[entry.mark] = entry
        self.pending.append(StateCopy(True, row, entry.mark))
        if moving:
            table.moving = entry

    def _unmark(self, entry: Entry) -> None:
        del self.marked[entry.mark]
        self.mark_free.append(entry.mark)
        entry.mark = -1

    def retire(self, table: Table, tokens: int) -> None:
        """Gives back the pages that a token at position ≥ `tokens` cannot see; their content stays in the index while there is room."""
        first = min(self._first(tokens), len(table.pages))
        for j in range(table.retired, first):
            self._drop(table.pages[j])
            table.pages[j] = -1
        table.retired = max(table.retired, first)

    def close(self, table: Table) -> None:
        """Gives back everything `table` holds, the deepest page first, so that it is also evicted first."""
        for page in reversed(table.pages):
            if page >= 0:
                self._drop(page, forget=table.salt != 0)
        table.pages, table.committed, table.retired, table.moving = [], 0, 0, None

    def _new(self) -> int | None:
        """A page held once, with nothing in it."""
        if not self.free and not self._evict():
            return None
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def _hold(self, page: int) -> None:
        if self.refs[page] == 0:
            del self.cached[page]
        self.refs[page] += 1

    def _drop(self, page: int, forget: bool = False) -> None:
        assert self.refs[page] > 0, f"page {page} given back twice"
        self.refs[page] -= 1
        if self.refs[page]:
            return
        entry = self.entry.get(page)
        if entry is not None and forget:
            self._leave(entry)
            if entry.host >= 0:
                self._leave_host(entry)
            entry = None
        if entry is None:
            self.free.append(page)
        else:
            self.cached[page] = entry

    def _evict(self) -> bool:
        """Frees the page that nobody has used for longest, after ordering its copy to the host tier where there is one."""
        if not self.cached:
            return False
        page, entry = self.cached.popitem(last=False)
        if self.host_count and entry.host < 0:
            if not self.host_free:
                self._leave_host(next(iter(self.host_used.values())))
            entry.host = self.host_free.pop()
            self.pending.append(Copy(True, page, entry.host))
        if entry.host >= 0:
            self.host_used[entry.host] = entry
            self.host_used.move_to_end(entry.host)
        self._leave(entry)
        self.free.append(page)
        return True

    def _leave(self, entry: Entry) -> None:
        """Takes an entry off its device page."""
        del self.entry[entry.page]
        entry.page = -1
        self._forget_if_gone(entry)

    def _leave_host(self, entry: Entry) -> None:
        del self.host_used[entry.host]
        self.host_free.append(entry.host)
        entry.host = -1
        self._forget_if_gone(entry)

    def _forget_if_gone(self, entry: Entry) -> None:
        if entry.page >= 0 or entry.host >= 0:
            return
        if entry.mark >= 0:
            self._unmark(entry)
        del self.index[entry.digest]
        rivals = self.children[entry.parent]
        rivals.remove(entry)
        if not rivals:
            del self.children[entry.parent]
        self.ghosts[entry.digest] = None
        if len(self.ghosts) > GHOSTS:
            self.ghosts.popitem(last=False)

    def clear(self) -> None:
        """Forgets every page that nobody holds, in both tiers."""
        for entry in list(self.host_used.values()):
            self._leave_host(entry)
        for page, entry in list(self.cached.items()):
            del self.cached[page]
            self._leave(entry)
            self.free.append(page)

    def check(self, tables: Iterable[Table]) -> None:
        """Raises AssertionError when a page is leaked, doubly owned or misfiled. `tables`: all that are open."""
        holds = [0] * self.count
        for table in tables:
            assert all(p < 0 for p in table.pages[:table.retired]) and all(p >= 0 for p in table.pages[table.retired:])
            live = [p for p in table.pages if p >= 0]
            assert len(set(live)) == len(live), f"a table holds a page twice: {live}"
            for page in live:
                holds[page] += 1
        assert holds == self.refs, f"references {self.refs} but tables hold {holds}"
        free = set(self.free)
        assert len(free) == len(self.free)
        for page in range(self.count):
            where = (page in self.cached) + (holds[page] > 0)
            assert (page in free) == (where == 0) and where < 2, f"page {page} is in {where} places"
            assert page not in self.entry or page not in free, f"free page {page} is indexed"
        assert all(self.entry.get(p) is e for p, e in self.cached.items())
        assert all(e.page == p and self.index.get(e.digest) is e for p, e in self.entry.items())
        assert all(e.host == h and self.index.get(e.digest) is e for h, e in self.host_used.items())
        assert sorted([*self.host_free, *self.host_used]) == list(range(self.host_count))
        assert sorted([*self.mark_free, *self.marked]) == list(range(self.marks or 0))
        assert all(e.mark == m and self.index.get(e.digest) is e for m, e in self.marked.items())
        assert all(e.page >= 0 or e.host >= 0 for e in self.index.values())
        assert sum(map(len, self.children.values())) == len(self.index)
