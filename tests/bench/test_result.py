"""A result as Markdown, JSON, CSV and pictures, and what its notes say of a busy machine."""
import csv
import io
import json
import sys

import pytest

from hetero.bench.result import Plot, Result, busy_note, cell, draw, markdown
from hetero.errors import BadOption

ROWS = [{"prompt": 128, "batch": 1, "tok/s": 845.123}, {"prompt": 512, "batch": 1, "tok/s": 1234.5, "note": "x"}]
RESULT = Result("run", {"machine": "m"}, ROWS, ["noise"], (Plot("prompt", "tok/s", "batch"),))


def test_a_table_lines_up_and_has_every_column():
    lines = markdown(ROWS).splitlines()
    assert lines[0] == "| prompt | batch | tok/s | note |" and lines[1] == "|-------:|------:|------:|------|" and len({len(x) for x in lines}) == 1
    assert lines[2] == "|    128 |     1 |   845 |      |" and "1,234" in lines[3] and markdown([]) == "(nothing measured)"


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (1e-5, "1.0e-05"), (0.12345, "0.123"), (12345.6, "12,346"), (float("nan"), "nan"), (None, ""), ("a", "a")])
def test_figures_have_the_digits_they_can_carry(value, text):
    assert cell(value) == text


def test_json_and_csv_hold_the_rows():
    found = json.loads(RESULT.json())
    assert found == {"name": "run", "facts": {"machine": "m"}, "rows": ROWS, "notes": ["noise"], "samples": []}
    assert [r["note"] for r in csv.DictReader(io.StringIO(RESULT.csv()))] == ["", "x"]
    assert RESULT.text().startswith("# run\n\n- machine: m\n\n| prompt") and RESULT.text().endswith("noise")


def test_pictures_are_drawn_and_a_missing_matplotlib_is_named(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    assert [p.name for p in draw(RESULT, tmp_path / "new")] == ["run-tok-s-prompt.png"]
    assert (tmp_path / "new" / "run-tok-s-prompt.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadOption, match="matplotlib") as missing:
        draw(RESULT, tmp_path)
    assert "hetero-moe[plot]" in missing.value.hint


def test_a_busy_machine_is_said():
    assert not busy_note({"load average before": 0.1}, 2)
    assert "1.50" in busy_note({"load average before": 1.5}, 2)[0]
