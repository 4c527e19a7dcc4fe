"""The door answers at once, turns faults into one line and a code, and names what was asked wrongly."""
import json
import subprocess
import sys

import pytest

from hetero import cli
from hetero.errors import BadCheckpoint, BadOption, BadRequest


def test_help_and_version_load_nothing_heavy():
    code = "import sys; from hetero.cli import parser; parser().format_help(); print([m for m in ('torch', 'numpy', 'numba', 'transformers', 'jinja2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0


@pytest.mark.parametrize("fault, code, words", [
    (BadOption("--ctx: no", "say yes"), 2, "error: --ctx: no\n\nhint: say yes"), (BadRequest("prompt too long", "cut it"), 2, "prompt too long"), (BadCheckpoint("x: cut", "again"), 1, "error: x: cut"),
    (KeyboardInterrupt(), 130, "stopped"), (BrokenPipeError(), 141, ""), (ZeroDivisionError("oh"), 1, "error: ZeroDivisionError: oh")])
def test_faults_become_one_line_and_a_code(monkeypatch, capsys, fault, code, words):
    def fail(args):
        raise fault
    monkeypatch.setattr(cli, "run_doctor", fail)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert cli.main(["doctor"]) == code
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err
    if isinstance(fault, ZeroDivisionError):
        cli.main(["doctor", "--debug"])
        assert "Traceback" in capsys.readouterr().err


def test_no_command_is_help_and_asked_wrongly(capsys):
    assert cli.main([]) == 2 and "doctor" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.main(["docter"])
    assert left.value.code == 2


def test_doctor_prints_json(monkeypatch, capsys, tmp_path):
    from hetero import doctor
    monkeypatch.setattr(doctor, "kernels", list)
    assert cli.main(["doctor", "--json", "--cache-dir", str(tmp_path)]) in (0, 1)
    assert {r["section"] for r in json.loads(capsys.readouterr().out)["rows"]} >= {"cpu", "gpu"}
