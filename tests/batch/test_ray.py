"""The same batch on a Ray cluster: a lost machine's rows run elsewhere, every row is there once and as on one machine."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batch.process import ROOT, TINY, rows_of, write

pytest.importorskip("ray")


def command(folder, out, *more):
    return [sys.executable, "-m", "hetero", "batch", "run", str(folder / "in.jsonl"), "-o", str(folder / out), "--model", str(TINY), "--deterministic",
            "--ctx", "256", "--max-batch", "8", "--cache-dir", str(folder.parent / "cache"), "--progress", "lines", *more]


def test_a_lost_node_costs_no_row_and_changes_no_answer(tmp_path):
    folder = tmp_path / "ray"
    write(folder, 80, 8)
    with (folder / "in.jsonl").open("a") as file:
        file.write('{"id": "r3", "prompt": "again"}\n{"prompt": 3}\n')
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    one = subprocess.run(command(folder, "one.jsonl"), cwd=ROOT, capture_output=True, text=True)
    assert one.returncode == 3, one.stderr
    both = subprocess.run([sys.executable, str(Path(__file__).with_name("two_nodes.py")), str(folder), *command(folder, "out.jsonl")],
                          cwd=ROOT, capture_output=True, text=True, env=environ)
    assert both.returncode == 3, both.stderr + both.stdout
    lost = re.search(r"lost a node after (\d+) rows", both.stdout)
    assert lost and 0 < int(lost[1]) < 80, "the node was lost in the middle"
    assert rows_of(folder / "out.jsonl") == rows_of(folder / "one.jsonl")
    assert len((folder / "out.errors.jsonl").read_text().splitlines()) == 2
    assert len(re.findall(r": \d+ rows, .* generated tokens, .* tok/s", both.stderr)) >= 1
