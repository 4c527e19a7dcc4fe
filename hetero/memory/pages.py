"""KV pages as numbers: which exact tokens a page holds, which pages a sequence holds, and what must be copied between tiers; knows no tensor.

Layers are grouped by their window, and each group has a pool of pages of its own (see `pool`): a sequence holds the pages of all its text where
layers see everything, and those of its last window elsewhere. A page enters the index only when it is full and its owner's step succeeded (`commit`);
the index is keyed by a chain of BLAKE2b digests, one per page of text whatever the group, and a hit is verified token by token. A prefix can be taken
when every group still has, in either tier, the pages that the token after it sees.

Models that keep a state per sequence can only go on from a place where the state was kept: a mark, one of `marks` state slots tied to an indexed
page. Each sequence keeps the mark of its prompt's last full page, and a second one that moves along with it.

Copies between tiers, and of states, are data (`pending`): whoever owns the memory runs and removes them, in order, before the next step writes.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from hetero.memory.pool import Copy, Entry, Pool, Size, StateCopy

GHOSTS = 65_536                          # digests remembered after eviction, to tell "evicted" from "never seen"


@dataclass(eq=False, slots=True)
class Table:
    """The pages of one sequence in order, per group (-1: given back), and the digests of its full pages as far as they were needed.

    `salt` separates namespaces: equal tokens under different salts never share; a nonzero salt's entries die with the last table that holds them.
    """

    pages: list[list[int]]               # all of one length
    retired: list[int]                   # leading pages given back, per group
    salt: int = 0
    prompt: int = 0                      # tokens of its prompt in full pages, the last token not among them: others may go on from there
    digests: list[bytes] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)       # what the index had for the first of these, already compared token by token
    committed: int = 0                   # full pages already offered to the index
    moving: Entry | None = None          # holder of the mark that moves along

    @property
    def root(self) -> bytes:
        return self.salt.to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt is in the index: `tokens` (a multiple of the page size), the first page that each group needs, the entries of the prompt's
    pages from the first of those on, and why no more (None: all of it)."""

    tokens: int
    first: tuple[int, ...]
    entries: tuple[Entry, ...]
    miss: str | None

    def of(self, group: int) -> tuple[Entry, ...]:
        return self.entries[self.first[group] - min(self.first):]


class Pages:
    """All pages of one cache, a pool per group. `marks`: state slots to go on from, None for a model without states."""

    def __init__(self, sizes: Sequence[Size], page_size: int, marks: int | None = None) -> None:
        self.page_size, self.marks = page_size, marks
        self.mark_free = list(range((marks or 0) - 1, -1, -1))
        self.marked: OrderedDict[int, Entry] = OrderedDict()       # marks in use, oldest first
        self.index: dict[bytes, Entry] = {}
        self.children: dict[bytes, list[Entry]] = {}               # parent digest -> entries, to say where a prompt departs
        self.ghosts: OrderedDict[bytes, None] = OrderedDict()
        self.pending: deque[Copy | StateCopy] = deque()
        self.pools = tuple(Pool(g, size, page_size, self.pending, self._forget) for g, size in enumerate(sizes))
        self.windowed = tuple(pool for pool in self.pools if pool.window is not None)
        self.whole = tuple(pool.group for pool in self.pools if pool.window is None)

    @property
    def held(self) -> int:
        return sum(pool.count - pool.available for pool in self.pools)

    def table(self, salt: int = 0, prompt: int = 0) -> Table:
        """That of a new sequence with so many prompt tokens."""
        return Table([[] for _ in self.pools], [0] * len(self.pools), salt, max(0, prompt - 1) // self.page_size * self.page_size)

    def need(self, tokens: int, chunk: int) -> list[int]:
        """Most pages of each group that a sequence of `tokens` holds at once when it is written `chunk` tokens at a time."""
        return [pool.need(tokens, chunk) for pool in self.pools]

    def _chain(self, table: Table, tokens: np.ndarray, full: int) -> None:
        """Extends `table.digests` to `full` pages of `tokens` (int32)."""
        parent = table.digests[-1] if table.digests else table.root
        for j in range(len(table.digests), full):
            parent = blake2b(parent + tokens[j * self.page_size:(j + 1) * self.page_size].tobytes(), digest_size=16).digest()
            table.digests.append(parent)

    def _find(self, table: Table, tokens: np.ndarray, j: int) -> Entry | None:
        entry, known = self.index.get(table.digests[j]), table.entries
        if entry is None or (j < len(known) and known[j] is entry):
            return entry
        if entry.tokens != tokens[j * self.page_size:(j + 1) * self.page_size].tobytes():
            return None
        if entry.parent != (table.digests[j - 1] if j else table.root):
            return None
        known[j:j + 1] = [entry] if j <= len(known) else []
        return entry

    def match(self, table: Table, tokens: np.ndarray, limit: int) -> Match:
        """The longest indexed prefix of `tokens` (int32) of at most `limit` tokens; changes nothing but what `table` knows of its pages."""
        full = min(limit, len(tokens)) // self.page_size
        self._chain(table, tokens, full)
        found: list[Entry | None] = []
        for j in range(full):
            entry = self._find(table, tokens, j)
            if self.whole and (entry is None or not all(map(entry.kept, self.whole))):
                break
            found.append(entry)
        reach = best = 0
        for end in range(len(found), 0, -1):                       # back to where every window, and a state, is there
            entry = found[end - 1]
            if entry is not None and (reach == 0 or self.marks is None or entry.mark >= 0) and self._seen(found, end):
                reach = reach or end
                if self.marks is None or entry.mark >= 0:
                    best = end
                    break
        first = tuple(pool.first(best * self.page_size) for pool in self.pools)
        miss = self._miss(table, tokens, best, full) if reach == best else f"state_not_rewindable@tok {best * self.page_size}"
        return Match(best * self.page_size, first, tuple(e for e in found[min(first):best] if e), miss)

    def _seen(self, found: list[Entry | None], end: int) -> bool:
        """Whether each pool with a window has what a token after `end` pages sees."""
        return all((e := found[j]) is not None and e.kept(pool.group)
                   for pool in self.windowed for j in range(end - 1, pool.first(end * self.page_size) - 1, -1))

    def _miss(self, table: Table, tokens: np.ndarray, best: int, full: int) -> str | None:
        if best == full:
            return None
        at = best * self.page_size
        if table.digests[best] in self.ghosts or table.digests[best] in self.index:      # in the index: a page beside it is gone
            return f"evicted@tok {at}"
        page = tokens[at:at + self.page_size]
        rivals = self.children.get(table.digests[best - 1] if best else table.root, ())
        common = [int((np.frombuffer(e.tokens, np.int32) == page).cumprod().sum()) for e in rivals[:64]]
        return f"prefix_mismatch@tok {at + max(common)}" if common else f"not_cached@tok {at}"

    def shared(self, match: Match) -> list[int]:
        """How many pages of `match` others hold now, per group: taking those costs nothing of what is available."""
        return [sum(e.page[g] >= 0 and pool.refs[e.page[g]] > 0 for e in match.of(g)) for g, pool in enumerate(self.pools)]

    def take(self, table: Table, match: Match, row: int = 0) -> int:
        """Gives `table` (empty) the pages of `match` by reference, with copies back from the host where needed, and `row` its state; returns the
        tokens obtained.

        Fewer than matched when a tier runs out of pages on the way.
        """
        assert not any(table.pages), "a table takes a match once"
        for g, pool in enumerate(self.pools):                      # hold what is here before anything is evicted to make room
            for entry in reversed(match.of(g)):
                pool.reserve(entry)
            table.pages[g] = [-1] * match.first[g] + [entry.page[g] for entry in match.of(g)]
        table.retired = list(match.first)
        for g, pool in enumerate(self.pools):
            for j, entry in enumerate(match.of(g), match.first[g]):
                if table.pages[g][j] < 0:
                    if not pool.fetch(entry):
                        return self._cut(table, j)
                    table.pages[g][j] = entry.page[g]
        table.committed = match.tokens // self.page_size
        if self.marks is not None and match.entries:
            self.pending.append(StateCopy(False, row, match.entries[-1].mark))
            self.marked.move_to_end(match.entries[-1].mark)
        return match.tokens

    def _cut(self, table: Table, j: int) -> int:
        """A table whose page j could not be had. Part of a window, or pages without their state, are of no use; the start of a prompt is."""
        if len(self.pools) > 1 or self.pools[0].window is not None or self.marks is not None:
            self.close(table)
            return 0
        for page in table.pages[0][j:]:
            if page >= 0:
                self.pools[0].drop(page)
        del table.pages[0][j:]
        table.committed = j
        return j * self.page_size

    def extend(self, table: Table, tokens: int) -> bool:
        """Grows `table` to hold `tokens` tokens. False, and nothing changed, when there are not enough pages."""
        short = -(-tokens // self.page_size) - len(table.pages[0])
        if short <= 0:
            return True
        if any(short > pool.available for pool in self.pools):
            return False
        for pool, line in zip(self.pools, table.pages, strict=True):
            for _ in range(short):
                page = pool.new()
                assert page is not None
                line.append(page)
        return True

    def commit(self, table: Table, tokens: np.ndarray, computed: int) -> None:
        """Offers the full pages among the first `computed` tokens to the index: their KV is written and known to be good."""
        full = computed // self.page_size
        if full <= table.committed:
            return
        self._chain(table, tokens, full)
        for j in range(table.committed, full):
            if max(line[j] for line in table.pages) < 0:
                continue
            entry = self.index.get(table.digests[j]) or self._enter(table, tokens, j)
            if self._find(table, tokens, j) is not entry:          # a digest collided
                continue
            for g, pool in enumerate(self.pools):
                if entry.page[g] < 0 <= table.pages[g][j]:         # else a twin got there first
                    pool.file(entry, table.pages[g][j])
        table.committed = full

    def _enter(self, table: Table, tokens: np.ndarray, j: int) -> Entry:
        parent, nowhere = table.digests[j - 1] if j else table.root, [-1] * len(self.pools)
        entry = Entry(table.digests[j], parent, tokens[j * self.page_size:(j + 1) * self.page_size].tobytes(), nowhere, list(nowhere))
        self.index[entry.digest] = entry
        self.children.setdefault(parent, []).append(entry)
        self.ghosts.pop(entry.digest, None)
        return entry

    def _forget(self, entry: Entry) -> None:
        """No tier has the page any more."""
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

    def _stays(self, table: Table, pool: Pool, j: int) -> bool:
        """Whether a page that a window has passed is one to go on from: at the end of the prompt, or along the text."""
        return table.salt == 0 and (pool.milestone(j) or pool.first(table.prompt) <= j < table.prompt // self.page_size)

    def retire(self, table: Table, tokens: int) -> None:
        """Gives back the pages that nobody who goes on after the last full page of `tokens` tokens sees; their content stays in the index while there
        is room."""
        for pool in self.windowed:
            line, retired = table.pages[pool.group], table.retired[pool.group]
            first = min(pool.first(tokens // self.page_size * self.page_size), len(line))
            for j in range(retired, first):
                pool.drop(line[j], passed=not self._stays(table, pool, j))
                line[j] = -1
            table.retired[pool.group] = max(retired, first)

    def close(self, table: Table) -> None:
        """Gives back everything `table` holds, the deepest page first, so that it is also evicted first."""
        for pool, line in zip(self.pools, table.pages, strict=True):
            last = pool.first(table.committed * self.page_size)
            for j in range(len(line) - 1, -1, -1):
                if line[j] >= 0:
                    pool.drop(line[j], table.salt != 0, j < last and not self._stays(table, pool, j))
        table.pages, table.retired = [[] for _ in self.pools], [0] * len(self.pools)
        table.committed, table.moving = 0, None

    def clear(self) -> None:
        """Forgets every page that nobody holds, in both tiers."""
        for pool in self.pools:
            pool.clear()

    def check(self, tables: Iterable[Table]) -> None:
        """Raises AssertionError when a page is leaked, doubly owned or misfiled. `tables`: all that are open."""
        tables = list(tables)
        assert all(len({len(line) for line in table.pages}) == 1 for table in tables), "groups of different lengths"
        for g, pool in enumerate(self.pools):
            pool.check((table.pages[g], table.retired[g]) for table in tables)
            assert all(self.index.get(e.digest) is e for e in (*pool.entry.values(), *pool.host_used.values()))
        assert sorted([*self.mark_free, *self.marked]) == list(range(self.marks or 0))
        assert all(e.mark == m and self.index.get(e.digest) is e for m, e in self.marked.items())
        assert not any(e.gone for e in self.index.values())
        assert sum(map(len, self.children.values())) == len(self.index)
