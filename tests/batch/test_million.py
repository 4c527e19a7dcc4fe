"""A very long input in flat memory."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batch.process import ROOT


def grown(folder, rows):
    found = subprocess.run([sys.executable, str(Path(__file__).with_name("million.py")), str(folder), str(rows)], cwd=ROOT, capture_output=True, text=True,
                           env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)})
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["lines"] == rows
    return result["growth_bytes"]


def test_twenty_thousand_rows_grow_by_little(tmp_path):
    assert grown(tmp_path, 20_000) < 100 << 20


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_million_rows_grow_by_less_than_200_mib(tmp_path):
    assert grown(tmp_path, 1_000_000) < 200 << 20
