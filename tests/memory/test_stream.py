"""The order and the cuts of streamed experts, as numbers; copies themselves need a GPU."""

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import UnusableHardware
from hetero.gpu import driver
from hetero.memory import stream
from hetero.memory.arena import Arena
from hetero.memory.cost import Machine
from hetero.memory.stream import break_even, cut, groups_of


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 100_000))
def test_groups_cover_every_expert_once_and_are_equal(experts, record, wanted):
    groups = groups_of(1 << 20, record, experts, wanted)
    assert [e for g in groups for e in range(g.first, g.first + g.count)] == list(range(experts))
    assert len({g.count for g in groups}) == 1
    assert all(g.address == (1 << 20) + g.first * record and g.nbytes == g.count * record for g in groups)
    assert groups[0].nbytes <= max(wanted, record)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.integers(1, 5000), st.integers(30, 700))
def test_no_copy_reaches_over_the_end_of_a_registered_piece(start, nbytes, piece):
    base = 4096
    parts = cut(base + start, nbytes, base, piece)
    assert [at for at, _ in parts] == [sum(n for _, n in parts[:i]) for i in range(len(parts))] and sum(n for _, n in parts) == nbytes
    assert all((start + at) // piece == (start + at + n - 1) // piece for at, n in parts)


def machine(pcie):
    return Machine(cores=16, ram_bytes=1 << 36, dram_bytes_s=100e9, cpu_flops=5e12, pcie_bytes_s=pcie)


def test_streaming_begins_where_the_copy_of_a_layer_is_shorter_than_the_cpus_time():
    record, experts, top_k, parameters = 2_654_208, 128, 8, 3 * 768 * 2048
    fast, slow = (break_even(record, experts, top_k, parameters, machine(p), 8192) for p in (55e9, 25e9))
    assert 1 < fast < slow <= 8192
    assert break_even(record, experts, top_k, parameters, machine(1e9), 64) == 65          # never within a chunk


def test_a_link_faster_than_the_memory_streams_from_the_first_token_that_needs_most_experts():
    assert break_even(1000, 8, 8, 10, machine(200e9), 8192) == 1


@pytest.fixture
def driver_calls(monkeypatch):
    """The driver's registrations by address, and copies as the CPU makes them."""
    said = []
    monkeypatch.setattr(driver, "register", lambda address, nbytes: said.append(("pin", address, nbytes)))
    monkeypatch.setattr(driver, "unregister", lambda address: said.append(("unpin", address)))
    monkeypatch.setattr(driver, "copy_in", lambda target, source, nbytes, stream: ctypes.memmove(target, source, nbytes))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    return said


def test_pins_go_once_when_closed_or_with_the_arena(driver_calls):
    arena = Arena(5 << 20)
    arena.memory[:] = 7
    base, pinned = int(arena.memory.ctypes.data), stream.Pinned(arena, torch.device("cpu"))
    assert pinned.nbytes == 5 << 20 and pinned.why == "" and driver_calls == [("pin", base, 5 << 20)]
    pinned.close()
    pinned.close()
    assert driver_calls[1:] == [("unpin", base)]
    stream.Pinned(arena, torch.device("cpu"))
    del driver_calls[:], arena
    gc.collect()
    assert driver_calls == [("unpin", base)]


def test_a_gpu_that_sees_other_bytes_than_the_cpu_is_not_trusted(driver_calls, monkeypatch):
    arena = Arena(1 << 20)
    arena.memory[:] = 7
    monkeypatch.setattr(driver, "copy_in", lambda target, source, nbytes, stream: ctypes.memset(target, 6, nbytes))
    with pytest.raises(UnusableHardware, match="other bytes"):
        stream.Pinned(arena, torch.device("cpu"))
