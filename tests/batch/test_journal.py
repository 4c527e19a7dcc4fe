"""The output files whatever happens between: torn ends, full disks, order, and any sequence of crashes and resumptions."""
import errno
import json
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hetero.batch.journal import Journal, Sink, encode
from hetero.batch.keys import Keys
from hetero.batch.rows import key_of
from hetero.errors import BadOption, NotWritable


def line(id, error=None):
    return encode({"custom_id": id, "response": {"text": f"answer {id} é"}, "error": error})


def ids(path):
    return [json.loads(text)["custom_id"] for text in path.read_text().splitlines()]


def test_a_torn_line_is_cut_and_whole_ones_stay(tmp_path):
    path = tmp_path / "out.jsonl"
    whole = b"".join(line(i) for i in "ab")
    for torn in (b'{"custom_id": "c", "resp', b"\0" * 100, b"\0" * 100 + b"\n\0\0", b'{"custom_id": "c"}\n'):
        path.write_bytes(whole + torn)
        journal = Journal(path)
        assert len(journal.keys) == 2 and path.read_bytes() == whole
        journal.append([b'{"custom_id": "d", "error": null}\n'], [key_of("d", 0)])
        journal.close()
        assert ids(path) == ["a", "b", "d"]


def test_damage_in_the_middle_is_not_ours_to_cut(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(line("a") + b"somebody's notes\n" + line("b"))
    before = path.read_bytes()
    with pytest.raises(BadOption, match="line 2 is no line of a batch"):
        Journal(path)
    assert path.read_bytes() == before


def test_two_processes_do_not_write_one_output(tmp_path):
    journal = Journal(tmp_path / "out.jsonl")
    with pytest.raises(BadOption, match="another process"):
        Journal(tmp_path / "out.jsonl")
    journal.close()
    Journal(tmp_path / "out.jsonl").close()


def test_a_repeat_is_known_by_its_line_and_not_by_its_id(tmp_path):
    journal = Journal(tmp_path / "bad.jsonl")
    texts = [line("a", {"code": "duplicate_id", "line": 9}), line(None, {"code": "invalid_request", "line": 4}), line("b", {"code": "server_error", "line": 5})]
    journal.append(texts, [b"x" * 16] * 3)
    journal.close()
    found = Journal(tmp_path / "bad.jsonl")
    assert Keys([key_of("a", 0), key_of(None, 9), key_of(None, 4), key_of("b", 0)]).within(found.keys).tolist() == [False, True, True, True]
    found.close()


@pytest.mark.parametrize("room", [0, 5, 70, 100])
def test_a_full_disk_keeps_whole_lines_and_says_so(tmp_path, monkeypatch, room):
    path, write, left = tmp_path / "out.jsonl", os.write, [room]

    def full(fd, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(fd, bytes(data)[:left[0]])
        left[0] -= done
        return done
    journal = Journal(path)
    journal.append([b'{"custom_id": "a", "error": null}\n'], [key_of("a", 0)])
    monkeypatch.setattr(os, "write", full)
    data = [b'{"custom_id": "%s", "error": null}\n' % n for n in (b"b", b"c", b"d")]
    with pytest.raises(NotWritable, match=r"No space left on device.*is kept") as found:
        journal.append(data, [key_of(n, 0) for n in "bcd"])
    assert "--resume" in found.value.hint
    kept = 1 + room // len(data[0])
    assert ids(path) == list("abcd")[:kept] and len(journal.keys) == kept
    journal.close()


def test_input_order_waits_for_earlier_turns_and_skips_finished_ones(tmp_path):
    good, bad = Journal(tmp_path / "good"), Journal(tmp_path / "bad")
    sink = Sink(good, bad, True)
    for turn in (3, 1, 4):
        sink.put(turn, key_of(str(turn), 0), line(str(turn)), turn != 4)
    sink.flush()
    assert good.size == 0 and sink.next == 0
    sink.skip(2)
    sink.put(0, key_of("0", 0), line("0"), True)
    sink.close()
    assert ids(tmp_path / "good") == ["0", "1", "3"] and ids(tmp_path / "bad") == ["4"] and sink.next == 5


class Life(RuleBasedStateMachine):
    """Rows finish in any order; the machine dies at any moment, with any part of what was not flushed on the disk; somebody resumes."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.paths = [Path(self.folder.name) / n for n in ("good", "bad")]
        self.safe = [0, 0]
        self.sink = None

    @initialize(rows=st.integers(1, 12), in_order=st.booleans(), failing=st.sets(st.integers(0, 11)))
    def begin(self, rows, in_order, failing):
        self.rows, self.in_order, self.failing = rows, in_order, failing
        self.keys = Keys(key_of(str(i), 0) for i in range(rows))
        self.resume()

    def resume(self):
        self.journals = [Journal(p) for p in self.paths]
        self.sink = Sink(*self.journals, self.in_order)
        done = self.keys.within(Keys.union(*(j.keys for j in self.journals)))
        self.todo = [i for i in range(self.rows) if not done[i]]
        for i in range(self.rows):
            if done[i]:
                self.sink.skip(i)
        assert all(p.stat().st_size >= safe for p, safe in zip(self.paths, self.safe, strict=True)), "what was flushed is there"

    @rule(which=st.integers(0, 11))
    def finish(self, which):
        if self.todo:
            turn = self.todo.pop(which % len(self.todo))
            good = turn not in self.failing
            self.sink.put(turn, self.keys.at(turn), line(str(turn), None if good else {"code": "server_error", "line": turn}), good)

    @rule()
    def flush(self):
        self.sink.flush()
        self.safe = [p.stat().st_size for p in self.paths]

    @rule(good=st.binary(max_size=30), bad=st.binary(max_size=30), seed=st.integers(0, 99))
    def die(self, good, bad, seed):
        """Some prefix of the group reached the disk, or junk without a newline did."""
        draw = random.Random(seed)
        pending = [[data for _, data in self.sink._groups[kind]] for kind in (True, False)]
        for j in self.journals:
            j.close()
        for path, lines, junk in zip(self.paths, pending, (good, bad), strict=True):
            data = b"".join(lines)
            torn = data[:draw.randrange(len(data) + 1)] if draw.random() < 0.7 else junk.replace(b"\n", b"\0")
            with path.open("ab") as file:
                file.write(torn)
        self.resume()

    @invariant()
    def every_row_is_there_at_most_once(self):
        if self.sink is not None:
            found = [i for p in self.paths for i in ids(p)]
            assert len(found) == len(set(found))

    def teardown(self):
        if self.sink is not None:
            while self.todo:
                self.finish(0)
            self.sink.close()
            good, bad = (ids(p) for p in self.paths)
            assert sorted(map(int, good)) == [i for i in range(self.rows) if i not in self.failing]
            assert sorted(map(int, bad)) == [i for i in range(self.rows) if i in self.failing]
            if self.in_order:
                assert good == sorted(good, key=int) and bad == sorted(bad, key=int)
        self.folder.cleanup()


Life.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestLife = Life.TestCase
