"""What a machine may take and whether its GPU can be used, read below a fake root; rates are remembered per machine."""

import json

import pytest
import torch

from hetero.memory import machine

MEMINFO = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def test_free_memory_is_what_the_kernel_calls_available(root):
    assert machine.ram_available(root) == 20000000 << 10


def test_a_cgroup_limit_anywhere_above_bounds_it_less_what_can_be_reclaimed(root):
    (root / "proc/self/cgroup").write_text("0::/a/b\n")
    (root / "sys/fs/cgroup/a/b").mkdir(parents=True)
    (root / "sys/fs/cgroup/a/b/memory.max").write_text("max\n")
    (root / "sys/fs/cgroup/a/memory.max").write_text(f"{8 << 30}\n")
    (root / "sys/fs/cgroup/a/memory.current").write_text(f"{3 << 30}\n")
    (root / "sys/fs/cgroup/a/memory.stat").write_text(f"anon 5\ninactive_file {1 << 30}\n")
    assert machine.ram_available(root) == 6 << 30


def test_the_first_version_of_cgroups_is_read_too(root):
    (root / "proc/self/cgroup").write_text("4:memory:/x\n2:cpu:/x\n")
    (root / "sys/fs/cgroup/memory/x").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory/x/memory.limit_in_bytes").write_text(str(4 << 30))
    (root / "sys/fs/cgroup/memory/x/memory.usage_in_bytes").write_text(str(1 << 30))
    assert machine.ram_available(root) == 3 << 30


def test_a_visible_gpu_that_torch_cannot_use_is_named_with_its_remedy(root, monkeypatch):
    assert machine.gpu_trouble(root) is None
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    what, remedy = machine.gpu_trouble(root)
    assert "CPU-only" in what and "pip install" in remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GTX 1080")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_86"])
    assert "GTX 1080 has compute capability 6.1" in machine.gpu_trouble(root)[0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    assert machine.gpu_trouble(root) is None


def test_rates_are_measured_once_and_remembered(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(machine, "_measure", lambda threads, gpu: calls.append(threads) or {"dram_bytes_s": 5e9, "cpu_flops": 1e11})
    first = machine.this_machine(tmp_path, "cpu")
    again = machine.this_machine(tmp_path, "cpu")
    assert len(calls) == 1 and first.dram_bytes_s == again.dram_bytes_s == 5e9 and first.assumed == ()
    [file] = tmp_path.glob("machine-*.json")
    file.write_text("{broken")
    machine.this_machine(tmp_path, "cpu")
    assert len(calls) == 2
    assert machine.this_machine(None, "cpu", measure=False).assumed == ("dram_bytes_s", "cpu_flops")


def test_a_measured_machine_is_json():
    found = machine.this_machine(None, "cpu")
    assert found.dram_bytes_s > 1e8 and found.ram_bytes > 0 and found.cores >= 1
    assert json.loads(json.dumps(machine.record(found)))["cores"] == found.cores


def test_rates_measured_beside_other_work_are_measured_again_when_there_is_quiet(tmp_path, monkeypatch):
    load, calls = [1e6], []
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load[0], 0.0, 0.0))
    monkeypatch.setattr(machine, "_measure", lambda threads, gpu: calls.append(1) or {"dram_bytes_s": 1e9 * len(calls), "cpu_flops": 1e11})
    busy = [machine.this_machine(tmp_path, "cpu") for _ in range(2)]
    assert len(calls) == 1 and all("busy" in m.name and m.dram_bytes_s == 1e9 for m in busy)
    load[0] = 0.0
    quiet = [machine.this_machine(tmp_path, "cpu") for _ in range(2)]
    assert len(calls) == 2 and all("busy" not in m.name and m.dram_bytes_s == 2e9 for m in quiet)
