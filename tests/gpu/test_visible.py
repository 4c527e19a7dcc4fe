"""Every way in which an NVIDIA GPU cannot be used is told with its remedy, and only a usable one is used."""
from dataclasses import replace

import pytest

from hetero.gpu.visible import Facts, gather, judge, look

NODES = ("nvidia0", "nvidia-uvm", "nvidiactl")
GOOD = Facts(1, NODES, False, "580.82.09", "2.13.0+cu130", "13.0", False, ("NVIDIA GeForce RTX 3060",), ((8, 6),), ("sm_75", "sm_80", "sm_86", "sm_90", "sm_120"))
NONE = replace(GOOD, names=(), capabilities=(), arches=())


def test_a_good_card_is_used_without_a_word():
    assert judge(GOOD).usable and judge(GOOD).why == ""
    assert judge(replace(GOOD, capabilities=((8, 9),))).usable          # sm_86 code runs on 8.9


@pytest.mark.parametrize("facts, seen, why, remedy", [
    (Facts(torch="2.13.0+cpu"), False, "no NVIDIA GPU", ""),
    (Facts(wsl=True), False, "in Windows", ""),
    (Facts(pci=1, torch="2.13.0+cpu"), True, "driver is not loaded", "ubuntu-drivers"),
    (Facts(pci=1, driver="580.1", torch="2.13.0"), True, "no /dev/nvidia", "--gpus all"),
    (replace(NONE, torch="2.13.0+cpu", cuda=""), True, "CPU-only", "/cu130"),
    (replace(NONE, torch="2.13.0+cpu", cuda="", driver="550.54.14"), True, "CPU-only", "/cu126"),
    (replace(NONE, driver="550.54.14"), True, "too old", "580 or newer, or pip install"),
    (replace(NONE, driver="470.2", fault="x"), True, "too old", "580 or newer"),
    (replace(NONE, hidden=True), True, "sees no GPU", "CUDA_VISIBLE_DEVICES"),
    (replace(NONE, fault="CUDA unknown error"), True, "CUDA unknown error", "nvidia-smi"),
    (replace(GOOD, names=("Tesla P40",), capabilities=((6, 1),)), True, "6.1, below 7.5", "--device cpu"),
    (replace(GOOD, arches=("sm_80", "sm_90"), capabilities=((7, 5),)), True, "no code for", "pip install"),
    (replace(GOOD, arches=("sm_80", "sm_90"), capabilities=((12, 0),)), True, "no code for", "pip install"),
])
def test_what_is_wrong_is_named_with_its_remedy(facts, seen, why, remedy):
    verdict = judge(facts)
    assert not verdict.usable and verdict.seen == seen
    assert why in verdict.why and remedy in verdict.remedy and (verdict.remedy or not seen)


def test_facts_are_read_below_a_root(tmp_path):
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030000\n")
    (tmp_path / "dev").mkdir()
    for name in (*NODES, "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.09  Release Build\n")
    assert gather(tmp_path, ask_torch=False) == Facts(1, tuple(sorted(NODES)), False, "580.82.09")
    assert gather(tmp_path / "empty", ask_torch=False) == Facts()


def test_this_machine_gets_a_verdict():
    verdict = look()
    assert verdict.usable or verdict.why
