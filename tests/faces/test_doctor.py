"""The doctor tells facts in rows, each with a remedy where something is wrong, and never raises."""
import json

import pytest

from hetero import doctor
from hetero.doctor import NOTE, OK, PROBLEM, Row, cgroup_limit, look, show
from hetero.options import resolve


def test_this_machine_is_told_section_by_section(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "kernels", lambda: [Row("kernels", "f32", "ok")])
    rows = look(resolve({"cache_dir": str(tmp_path)}, {}), tmp_path)
    assert list(dict.fromkeys(r.section for r in rows)) == ["system", "cpu", "memory", "limits", "gpu", "folders", "kernels"]
    assert all(r.remedy for r in rows if r.state != OK and r.value != "no: no NVIDIA GPU is visible")
    assert any(str(tmp_path) in r.value and "writable" in r.value for r in rows)


def test_kernels_agree_with_their_twins():
    assert {r.name for r in doctor.kernels()} >= {"f32", "bf16", "int8_g32", "int4_g32"}
    assert all(r.state == OK for r in doctor.kernels())


def test_a_section_that_fails_is_one_row(tmp_path, monkeypatch):
    def broken():
        raise OSError("no such thing\nmore")
    monkeypatch.setattr(doctor, "kernels", broken)
    assert look(resolve({"cache_dir": str(tmp_path)}, {}), tmp_path)[-1] == Row(
        "kernels", "kernels", "could not be looked at: OSError: no such thing", PROBLEM, "reinstall hetero in a fresh environment")


def test_json_and_text_say_the_same(capsys):
    rows = [Row("a", "x", "1"), Row("b", "y", "2", NOTE, "do this")]
    assert show(rows, True) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "rows": [
        {"section": "a", "name": "x", "value": "1", "state": "ok", "remedy": ""}, {"section": "b", "name": "y", "value": "2", "state": "note", "remedy": "do this"}]}
    assert show(rows, False) == 0 and "-> do this" in capsys.readouterr().out
    assert show([Row("a", "x", "1", PROBLEM, "fix")], False) == 1


@pytest.mark.parametrize("files, want", [
    ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/memory.max": "1000000\n", "sys/fs/cgroup/a/b/memory.max": "max"}, 1000000),
    ({"proc/self/cgroup": "5:memory:/x", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4096", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 4096),
    ({"proc/self/cgroup": "0::/"}, None), ({}, None)])
def test_the_smallest_memory_limit_on_the_way_counts(tmp_path, files, want):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup_limit(tmp_path) == want
