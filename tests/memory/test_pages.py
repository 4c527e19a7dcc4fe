"""Pages under random schedules: what a page is said to hold is what was written to it, in both tiers, and none is lost or owned twice."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from hetero.memory.pages import Pages
from hetero.memory.pool import Copy, Size

SIZE = 4


def drain(pages):
    orders = list(pages.pending)
    pages.pending.clear()
    return orders


class Schedules(RuleBasedStateMachine):
    """Sequences over a small alphabet, so that prefixes are often shared; `device` and `host` hold, per page, the prefix it was written with."""

    open = Bundle("open")

    @initialize(groups=st.lists(st.tuples(st.integers(3, 9), st.integers(0, 5), st.sampled_from([None, 1, 5, 8])), min_size=1, max_size=3,
                                unique_by=lambda g: g[2]))
    def start(self, groups):
        self.pages = Pages([Size(*group) for group in groups], SIZE)
        self.device, self.host = {}, {}                    # (group, page) -> what it was written with
        self.tables, self.salts = [], 0

    def copy(self):
        for order in drain(self.pages):
            source, target = (order.group, order.source), (order.group, order.target)
            if order.to_host:
                self.host[target] = self.device[source]
            else:
                self.device[target] = self.host[source]

    def longest(self, table, full):
        """The longest prefix of `full` pages after which every layer finds what it sees, looked for from the end; digests do not collide here."""
        entries = [self.pages.index.get(table.digests[j]) for j in range(full)]
        for end in range(full, 0, -1):
            seen = [(pool.group, entries[j]) for pool in self.pages.pools for j in range(pool.first(end * SIZE), end)]
            if entries[end - 1] is not None and all(e is not None and e.kept(group) for group, e in seen):
                return end * SIZE
        return 0

    @rule(target=open, story=st.integers(0, 3), length=st.integers(1, 22), ending=st.integers(0, 2), private=st.sampled_from([False] * 5 + [True]))
    def begin(self, story, length, ending, private):
        """Four stories, told up to some length, with one of three endings."""
        self.salts += private
        table, tokens = self.pages.table(self.salts if private else 0), np.array([story * 100 + i for i in range(length)] + [7] * ending, np.int32)
        match = self.pages.match(table, tokens, len(tokens) - 1)
        assert match.tokens == self.longest(table, (len(tokens) - 1) // SIZE)
        got = self.pages.take(table, match)
        assert got <= match.tokens
        self.copy()
        for pool, line in zip(self.pages.pools, table.pages, strict=True):
            for j, page in enumerate(line):
                if page >= 0:
                    assert self.device[pool.group, page] == (table.salt, tuple(tokens[:(j + 1) * SIZE])), "a hit on another prefix"
            assert all(p >= 0 for p in line[pool.first(got):]) and len(line) * SIZE == got
        entry = [table, tokens, got]
        self.tables.append(entry)
        return entry

    @rule(entry=open, count=st.integers(1, 9), good=st.booleans())
    def write(self, entry, count, good):
        table, tokens, computed = entry
        upto = min(computed + count, len(tokens))
        if all(e is not entry for e in self.tables) or upto == computed:
            return
        self.pages.retire(table, computed)
        before = [list(line) for line in table.pages]
        if not self.pages.extend(table, upto):
            assert table.pages == before and any(-(-upto // SIZE) - len(before[0]) > pool.available for pool in self.pages.pools)
            return
        self.copy()
        for pool, line in zip(self.pages.pools, table.pages, strict=True):
            assert sum(p >= 0 for p in line) <= pool.need(upto, upto - computed)
            for j in range(computed // SIZE, -(-upto // SIZE)):
                assert pool.refs[line[j]] == 1, "a shared page is written"
                self.device[pool.group, line[j]] = (table.salt, tuple(tokens[:min(upto, (j + 1) * SIZE)]))
        entry[2] = upto
        if good:
            self.pages.commit(table, tokens, upto)

    @rule(story=st.integers(0, 3), length=st.integers(4, 22), ending=st.integers(0, 2))
    def serve(self, story, length, ending):
        """One request from begin to end."""
        entry = self.begin(story, length, ending, False)
        for _ in range(len(entry[1])):
            self.write(entry, SIZE, True)
        self.end(entry)

    @rule(entry=consumes(open))
    def end(self, entry):
        if any(e is entry for e in self.tables):
            self.pages.close(entry[0])
            self.tables = [e for e in self.tables if e is not entry]

    @rule()
    def clear(self):
        self.pages.clear()
        assert not any(pool.passed or pool.cached or pool.host_used for pool in self.pages.pools)

    @precondition(lambda self: self.tables == [])
    @rule()
    def nothing_is_held_when_idle(self):
        assert self.pages.held == 0 and all(pool.available == pool.count for pool in self.pages.pools)

    @invariant()
    def sound(self):
        if self.__dict__.get("pages"):
            self.pages.check(entry[0] for entry in self.tables)


Schedules.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
TestSchedules = Schedules.TestCase


def filled(pages, tokens, salt=0):
    """A table with `tokens` written and indexed."""
    table, tokens = pages.table(salt), np.array(tokens, np.int32)
    pages.take(table, pages.match(table, tokens, len(tokens)))
    assert pages.extend(table, len(tokens))
    pages.commit(table, tokens, len(tokens))
    return table


def hit(pages, tokens):
    """How many of `tokens` are indexed."""
    return pages.match(pages.table(), np.array(tokens, np.int32), len(tokens)).tokens


def test_the_page_used_least_recently_is_evicted_first_and_the_deepest_of_a_prompt_before_its_start():
    pages = Pages([Size(4)], SIZE)
    pages.close(filled(pages, range(8)))
    pages.close(filled(pages, range(100, 108)))
    pages.close(filled(pages, range(8)))
    assert pages.extend(pages.table(), 12)
    assert hit(pages, range(8)) == 4 and hit(pages, range(100, 108)) == 0


def test_an_evicted_page_is_copied_out_once_and_back_on_a_hit():
    pages = Pages([Size(2, 2)], SIZE)
    first = filled(pages, range(8))
    held = list(first.pages[0])
    pages.close(first)
    other = pages.table()
    pages.extend(other, 8)
    assert drain(pages) == [Copy(True, held[1], 0), Copy(True, held[0], 1)]
    pages.close(other)
    again = filled(pages, range(8))
    assert sorted(drain(pages), key=lambda o: o.source) == [Copy(False, 0, again.pages[0][1]), Copy(False, 1, again.pages[0][0])]
    pages.close(again)
    pages.extend(pages.table(), 8)
    assert drain(pages) == [], "the host still has them"


def test_a_digest_that_collides_is_no_hit():
    pages = Pages([Size(4)], SIZE)
    filled(pages, range(4))
    digest = next(iter(pages.index))
    pages.index[digest].tokens = np.arange(50, 54, dtype=np.int32).tobytes()
    assert hit(pages, range(4)) == 0


def test_pages_behind_the_window_are_given_back_and_a_hit_needs_only_those_inside():
    pages = Pages([Size(8, 0, 6)], SIZE)
    table = filled(pages, range(24))
    pages.retire(table, 24)
    assert table.pages[0][:4] == [-1] * 4 and len(pages.pools[0].passed) == 4
    match = pages.match(pages.table(), np.arange(30, dtype=np.int32), 29)
    assert (match.tokens, match.first, len(match.entries)) == (24, (4,), 2)
    assert pages.need(1000, 4) == [4]


def test_each_group_keeps_what_its_layers_see_and_a_hit_needs_the_whole_of_one_and_the_last_window_of_the_other():
    pages = Pages([Size(8), Size(4, 0, 6)], SIZE)
    table, tokens = pages.table(), np.arange(24, dtype=np.int32)
    for computed in range(0, 24, 4):
        pages.retire(table, computed)
        assert pages.extend(table, computed + 4)
        pages.commit(table, tokens, computed + 4)
    pages.retire(table, 24)
    whole, window = table.pages
    assert min(whole) >= 0 and window[:4] == [-1] * 4 and min(window[4:]) >= 0 and pages.need(24, 4) == [6, 4]
    pages.close(table)
    match = pages.match(pages.table(), tokens, 24)
    assert (match.tokens, match.first, len(match.of(0)), len(match.of(1))) == (24, (0, 4), 6, 2)
    taken = pages.table()
    assert pages.take(taken, match) == 24 and (taken.pages[0], taken.pages[1][4:]) == (whole, window[4:]) and taken.retired == [0, 4]


def test_a_prefix_whose_last_window_is_gone_is_said_to_be_evicted_although_other_layers_have_it():
    pages = Pages([Size(8), Size(4, 0, 6)], SIZE)
    table = filled(pages, range(16))
    pages.retire(table, 16)
    pages.close(table)
    pages.close(filled(pages, range(100, 112)))
    match = pages.match(pages.table(), np.arange(16, dtype=np.int32), 16)
    assert (match.tokens, match.miss) == (0, "evicted@tok 0")


def test_what_a_window_has_passed_goes_before_where_a_sequence_ended_and_is_not_copied_out():
    pages = Pages([Size(12), Size(7, 8, 6)], SIZE)
    pages.close(filled(pages, range(8)))
    table = filled(pages, range(100, 120))
    ended, passed = set(pages.pools[1].cached), table.pages[1][:3]
    pages.retire(table, 20)
    assert len(ended) == 2 and list(pages.pools[1].passed) == passed
    assert pages.extend(table, 32) and drain(pages) == [] and hit(pages, range(8)) == 8
    assert pages.extend(table, 36) and [(o.to_host, o.source in ended, o.group) for o in drain(pages)] == [(True, True, 1)]


def test_a_long_text_that_loses_its_last_pages_goes_on_from_a_window_kept_along_it():
    pages, tokens = Pages([Size(320), Size(56, 0, 128)], 16), np.arange(5000, dtype=np.int32)
    table = pages.table()
    for computed in range(0, 5000, 250):
        pages.retire(table, computed)
        assert pages.extend(table, computed + 250)
        pages.commit(table, tokens, computed + 250)
    pages.close(table)
    assert hit(pages, tokens) == 4992
    pages.close(filled(pages, range(9000, 9480)))          # takes 30 pages: the last 23 of the text go, and what its windows have passed
    assert hit(pages, tokens) == 4096 and pages.pools[1].milestone(255) and not pages.pools[1].milestone(256)
    assert [j for j in range(256) if pages.pools[1].milestone(j)] == [*range(120, 128), *range(248, 256)]


@pytest.mark.parametrize("sizes", [(0, 4, 0), (1, 0, 0), (1, 1, -1)])
def test_sizes_that_cannot_be_are_refused(sizes):
    count, page_size, host_count = sizes
    with pytest.raises(ValueError, match="pages"):
        Pages([Size(count, host_count)], page_size)
