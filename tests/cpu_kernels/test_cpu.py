"""What the machine is, read from faked /proc and /sys trees."""
from pathlib import Path

import pytest

from cpu_kernels import cpu
from cpu_kernels.team import Team


def machine(root: Path, count: int, smt: int = 1, files: dict[str, str] | None = None) -> Path:
    """A tree with `count` CPUs where CPU c and c + count/2 are siblings when smt is 2."""
    texts = {"proc/cpuinfo": "model name\t: Fake 9000\n", "sys/devices/system/cpu/online": f"0-{count - 1}\n", **(files or {})}
    for c in range(count):
        half = count // smt
        texts[f"sys/devices/system/cpu/cpu{c}/topology/thread_siblings_list"] = ",".join(str(c % half + half * i) for i in range(smt))
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_threads_are_physical_cores_less_one_above_four(tmp_path):
    for count, smt, expected in ((2, 1, 2), (4, 1, 4), (8, 2, 4), (16, 2, 7), (16, 1, 15)):
        here = cpu.read(machine(tmp_path / f"{count}-{smt}", count, smt), range(count))
        assert here.threads == expected
        assert here.name == "Fake 9000"


def test_affinity_and_smt_siblings_count_cores_not_cpus(tmp_path):
    here = cpu.read(machine(tmp_path, 16, 2), [0, 8, 3, 11, 5])
    assert here.cores == ((0, 8), (3, 11), (5,))
    assert here.threads == 3
    assert "affinity allows 5 of 16 CPUs" in here.reason
    assert "2 SMT siblings not used" in here.reason
    assert here.pick(3) == [3, 5, 0]
    assert sorted(here.pick(5)) == [0, 3, 5, 8, 11]
    assert len(here.pick(9)) == 9


def test_a_fractional_cgroup_v2_quota_caps_the_threads(tmp_path):
    files = {"proc/self/cgroup": "0::/box/inner\n", "sys/fs/cgroup/box/cpu.max": "765000 100000\n", "sys/fs/cgroup/box/inner/cpu.max": "max 100000\n"}
    here = cpu.read(machine(tmp_path, 96, 1, files), range(96))
    assert here.quota == pytest.approx(7.65)
    assert here.threads == 6
    assert "cgroup quota 7.65" in here.reason


def test_a_quota_below_one_cpu_still_gives_one_thread(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}
    assert cpu.read(machine(tmp_path, 4, 1, files), range(4)).threads == 1


def test_a_cgroup_v1_quota_is_read_and_minus_one_means_none(tmp_path):
    base = "sys/fs/cgroup/cpu,cpuacct"
    files = {"proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:memory:/x\n", f"{base}/cpu.cfs_quota_us": "300000", f"{base}/cpu.cfs_period_us": "100000"}
    assert cpu.quota(machine(tmp_path / "a", 8, 1, files)) == 3.0
    files[f"{base}/cpu.cfs_quota_us"] = "-1"
    assert cpu.quota(machine(tmp_path / "b", 8, 1, files)) is None
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000"}
    assert cpu.quota(machine(tmp_path / "c", 8, 1, files)) is None


def test_efficiency_cores_are_left_out_and_named(tmp_path):
    here = cpu.read(machine(tmp_path, 8, 1, {"sys/devices/cpu_atom/cpus": "4-7\n"}), range(8))
    assert here.threads == 4
    assert "4 efficiency cores not used" in here.reason
    assert here.pick(4) == [1, 2, 3, 0]


def test_numa_nodes_are_listed_within_the_mask(tmp_path):
    files = {"sys/devices/system/node/node0/cpulist": "0-3\n", "sys/devices/system/node/node1/cpulist": "4-7\n"}
    assert cpu.read(machine(tmp_path, 8, 1, files), [1, 2, 6]).nodes == ((1, 2), (6,))


def test_instruction_sets_follow_from_features():
    avx512 = ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"]
    assert cpu.isas([]) == ("generic",)
    assert cpu.isas(["avx2", "fma", "f16c", "avxvnni"]) == ("generic", "avx2", "avx_vnni")
    assert cpu.isas(avx512) == ("generic", "avx2", "avx512_vnni")
    assert cpu.isas([*avx512, "avx512bf16", "amx-tile", "amx-int8", "amx-bf16"])[-1] == "amx"


def test_an_instruction_set_is_capped_by_name_and_refused_when_lacking(monkeypatch):
    monkeypatch.setattr(cpu, "features", lambda: frozenset(["avx2", "fma", "f16c"]))
    assert cpu.isa("") == "avx2"
    assert cpu.isa("generic") == "generic"
    monkeypatch.setenv("HETERO_ISA", "amx")
    with pytest.raises(ValueError, match="HETERO_ISA=amx: this CPU lacks it; usable here: generic, avx2"):
        cpu.isa()
    with pytest.raises(ValueError, match="no such instruction set"):
        cpu.isa("sse9")


def test_a_second_holder_takes_free_cores_or_shares(tmp_path):
    first = cpu.hold([3, 2, 1], 2, tmp_path / "locks")
    assert first.cores == (3, 2) and not first.shared
    second = cpu.hold([3, 2, 1], 2, tmp_path / "locks")
    assert second.cores == (1,) and not second.shared
    third = cpu.hold([3, 2, 1], 2, tmp_path / "locks")
    assert third.cores == (3, 2) and third.shared
    first.release()
    first.release()
    assert cpu.hold([3, 2, 1], 2, tmp_path / "locks").cores == (3, 2)


def test_cores_count_as_free_where_no_lock_can_be_kept(tmp_path):
    (tmp_path / "file").write_text("")
    held = cpu.hold([1, 0], 2, tmp_path / "file" / "locks")
    assert held.cores == (1, 0) and not held.shared


def test_a_team_that_got_fewer_cores_says_who_holds_the_others(monkeypatch, tmp_path):
    lonely = cpu.hold(cpu.read().pick(1), 1, tmp_path / "locks")
    real = cpu.hold
    monkeypatch.setattr(cpu, "hold", lambda wanted, count: real(wanted, count, tmp_path / "locks"))
    if cpu.read().threads == 1:
        pytest.skip("one thread: the second team shares its core")
    with Team() as team:
        assert team.threads == cpu.read().threads - 1 and lonely.cores[0] not in team.cores
        assert team.reason == f"{cpu.read().reason}, less 1 held by another process's team"
