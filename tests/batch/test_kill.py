"""A batch as its own process on an embedded model: killed again and again, on a full disk, told to stop; and its answers stay the same."""
import os
import pty
import random
import resource
import signal
import subprocess
import time

import pytest

from tests.batch.process import ROOT, command, rows_of, start, write


def killed_and_resumed(folder, kills, draw):
    """Kills at moments spread over the whole run, by how much is written; each time with whatever the disk has then."""
    out, goal = folder / "out.jsonl", (folder / "whole.jsonl").stat().st_size
    seen = 0
    for n in range(kills):
        process = start(folder, *(["--resume"] if n else []))
        least = draw.uniform(0, goal * 0.9 * (n + 1) / kills)
        while process.poll() is None and not (out.exists() and out.stat().st_size >= least and draw.random() < 0.3):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert out.stat().st_size >= seen or not out.exists()
        seen = out.stat().st_size if out.exists() else 0
    process = start(folder, "--resume")
    said = process.communicate()[1]
    assert process.returncode == 0, said


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / f"kill{time.monotonic_ns()}"


def whole(folder, count, tokens):
    write(folder, count, tokens)
    process = subprocess.run(command(folder, out="whole.jsonl"), cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return rows_of(folder / "whole.jsonl")


def test_killed_twice_every_row_is_there_once_and_the_same(folder):
    expected = whole(folder, 60, 24)
    killed_and_resumed(folder, 2, random.Random(1))
    assert rows_of(folder / "out.jsonl") == expected and len(expected) == 60


@pytest.mark.slow
def test_killed_at_twenty_random_moments_of_500_rows(folder):
    expected = whole(folder, 500, 32)
    killed_and_resumed(folder, 20, random.Random(2))
    assert rows_of(folder / "out.jsonl") == expected and len(expected) == 500


def test_a_file_that_may_not_grow_is_an_error_that_keeps_what_is_finished(folder):
    write(folder, 40, 12)
    small = start(folder, preexec_fn=lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))))
    said = small.communicate()[1]
    assert small.returncode == 1 and "out.jsonl: File too large; what was finished before is kept" in said and "--resume" in said
    kept = rows_of(folder / "out.jsonl")
    assert 0 < len(kept) < 40
    again = start(folder, "--resume")
    said = again.communicate()[1]
    assert again.returncode == 0, said
    assert len(rows_of(folder / "out.jsonl")) == 40 and kept.items() <= rows_of(folder / "out.jsonl").items()


def test_a_device_and_a_read_only_folder_are_said_before_the_model_is_loaded(folder):
    write(folder, 4, 4)
    for out, said in (("/dev/full", "/dev/full: no regular file"), ("/proc/out.jsonl", "/proc/out.jsonl: ")):
        found = subprocess.run([*command(folder), "-o", out], cwd=ROOT, capture_output=True, text=True)
        assert found.returncode in (1, 2) and said in found.stderr and "tok/s" not in found.stderr, found.stderr


def test_a_terminal_has_a_bar_and_ctrl_c_ends_in_130(folder):
    write(folder, 300, 48)
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*command(folder), "--progress", "auto"], cwd=ROOT, stderr=theirs, stdin=theirs)
    os.close(theirs)
    seen, sent = b"", False
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:                                    # the other end is closed
            break
        if not sent and b" generated " in seen and (folder / "out.jsonl").exists() and (folder / "out.jsonl").stat().st_size:
            process.send_signal(signal.SIGINT)
            sent = True
    os.close(ours)
    assert process.wait() == 130
    text = seen.decode()
    assert "of 300 rows" in text and "finishing what runs" in text and "run again with --resume" in text and "\x1b[" in text
    assert 0 < len(rows_of(folder / "out.jsonl")) < 300
