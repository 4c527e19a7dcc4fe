"""Pages under random schedules: what a page is said to hold is what was written to it, in both tiers, and none is lost or owned twice."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from hetero.memory.pages import Copy, Pages, Table

SIZE = 4


def drain(pages):
    orders = list(pages.pending)
    pages.pending.clear()
    return orders


class Schedules(RuleBasedStateMachine):
    """Sequences over a small alphabet, so that prefixes are often shared; `device` and `host` hold, per page, the prefix it was written with."""

    open = Bundle("open")

    @initialize(count=st.integers(3, 9), host=st.integers(0, 5), window=st.sampled_from([None, 1, 5, 8]))
    def start(self, count, host, window):
        self.pages = Pages(count, SIZE, host, window)
        self.device, self.host = {}, {}
        self.tables, self.salts = [], 0

    def copy(self):
        for order in drain(self.pages):
            if order.to_host:
                self.host[order.target] = self.device[order.source]
            else:
                self.device[order.target] = self.host[order.source]

    @rule(target=open, story=st.integers(0, 3), length=st.integers(1, 22), ending=st.integers(0, 2), private=st.sampled_from([False] * 5 + [True]))
    def begin(self, story, length, ending, private):
        """Four stories, told up to some length, with one of three endings."""
        self.salts += private
        table, tokens = Table(self.salts if private else 0), np.array([story * 100 + i for i in range(length)] + [7] * ending, np.int32)
        match = self.pages.match(table, tokens, len(tokens) - 1)
        assert match.tokens <= len(tokens) - 1 and match.tokens % SIZE == 0
        got = self.pages.take(table, match)
        assert got <= match.tokens
        self.copy()
        for j, page in enumerate(table.pages):
            if page >= 0:
                assert self.device[page] == (table.salt, tuple(tokens[:(j + 1) * SIZE])), "a hit on another prefix"
        first = self.pages._first(got)
        assert all(p >= 0 for p in table.pages[first:]) and len(table.pages) * SIZE == got
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
        before = list(table.pages)
        if not self.pages.extend(table, upto):
            assert table.pages == before and -(-upto // SIZE) - len(before) > self.pages.available
            return
        self.copy()
        for j in range(computed // SIZE, -(-upto // SIZE)):
            assert self.pages.refs[table.pages[j]] == 1, "a shared page is written"
            self.device[table.pages[j]] = (table.salt, tuple(tokens[:min(upto, (j + 1) * SIZE)]))
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
        assert not self.pages.cached and not self.pages.host_used

    @precondition(lambda self: self.tables == [])
    @rule()
    def nothing_is_held_when_idle(self):
        assert self.pages.held == 0 and self.pages.available == self.pages.count

    @invariant()
    def sound(self):
        if self.__dict__.get("pages"):
            self.pages.check(entry[0] for entry in self.tables)


Schedules.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
TestSchedules = Schedules.TestCase


def filled(pages, tokens, salt=0):
    """A table with `tokens` written and indexed."""
    table, tokens = Table(salt), np.array(tokens, np.int32)
    pages.take(table, pages.match(table, tokens, len(tokens)))
    assert pages.extend(table, len(tokens))
    pages.commit(table, tokens, len(tokens))
    return table


def test_the_page_used_least_recently_is_evicted_first_and_the_deepest_of_a_prompt_before_its_start():
    pages = Pages(4, SIZE)
    pages.close(filled(pages, range(8)))
    pages.close(filled(pages, range(100, 108)))
    pages.close(filled(pages, range(8)))
    third = Table()
    assert pages.extend(third, 12)
    assert pages.match(Table(), np.arange(8, dtype=np.int32), 8).tokens == 4
    assert pages.match(Table(), np.arange(100, 108, dtype=np.int32), 8).tokens == 0


def test_an_evicted_page_is_copied_out_once_and_back_on_a_hit():
    pages = Pages(2, SIZE, 2)
    first = filled(pages, range(8))
    held = list(first.pages)
    pages.close(first)
    other = Table()
    pages.extend(other, 8)
    assert drain(pages) == [Copy(True, held[1], 0), Copy(True, held[0], 1)]
    pages.close(other)
    again = filled(pages, range(8))
    assert sorted(drain(pages), key=lambda o: o.source) == [Copy(False, 0, again.pages[1]), Copy(False, 1, again.pages[0])]
    pages.close(again)
    pages.extend(Table(), 8)
    assert drain(pages) == [], "the host still has them"


def test_a_digest_that_collides_is_no_hit():
    pages = Pages(4, SIZE)
    filled(pages, range(4))
    digest = next(iter(pages.index))
    pages.index[digest].tokens = np.arange(50, 54, dtype=np.int32).tobytes()
    assert pages.match(Table(), np.arange(4, dtype=np.int32), 4).tokens == 0


def test_pages_behind_the_window_are_given_back_and_a_hit_needs_only_those_inside():
    pages = Pages(8, SIZE, window=6)
    table = filled(pages, range(24))
    pages.retire(table, 24)
    assert table.pages[:4] == [-1] * 4 and len(pages.cached) == 4
    taken = Table()
    match = pages.match(taken, np.arange(30, dtype=np.int32), 29)
    assert (match.tokens, match.first, len(match.entries)) == (24, 4, 2)
    assert pages.need(1000, 4) == 4


@pytest.mark.parametrize("sizes", [(0, 4, 0), (1, 0, 0), (1, 1, -1)])
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(ValueError, match="pages"):
        Pages(*sizes)
