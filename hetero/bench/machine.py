"""`hetero bench machine`: what this machine can do at most, by the kernels themselves, and kept for the planner; decides nothing."""

from typing import Any

import torch

from cpu_kernels import Team, ceilings, cpu, measure, tiles
from hetero.bench.result import Result, Row, busy_note, machine_facts
from hetero.bench.timer import spread
from hetero.memory import machine as machines
from hetero.options import Options

REPEATS, READ_BYTES = 7, 256 << 20


def row(what: str, unit: str, samples: list[float], threads: int | None = None) -> Row:
    """The best (what the machine can do) beside median and spread (what it did while others ran)."""
    return {"what": what, "threads": threads, "unit": unit, "best": max(samples), "median": sorted(samples)[len(samples) // 2],
            "spread %": round(100 * spread(samples), 1)}


def bench(options: Options) -> Result:
    here = cpu.read()
    threads = options.threads or here.threads
    facts = machine_facts(threads)
    rows = [r for n in counts(threads) for r in on_cpu(n, options, whole=n == threads)]
    found = machines.this_machine(options.cache_dir, options.device, again=True)
    if found.gpu:
        rows += on_gpu(int(options.device.partition(":")[2] or 0) if options.device.startswith("cuda") else 0)
        facts["GPU"] = found.gpu
    kept = {n: f"{getattr(found, n) / 1e9:.1f} G/s" for n in machines.RATES if getattr(found, n)}
    facts["kept for the planner"] = f"{', '.join(f'{n} {v}' for n, v in kept.items())} in {options.cache_dir}"
    notes = ["Spread is half the distance between the quartiles of the repeats, as a share of their median.", *busy_note(facts, threads)]
    return Result("machine", facts, rows, notes)


def counts(threads: int) -> list[int]:
    """1, 2, 4, … and all."""
    return sorted({n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < threads} | {threads})


def on_cpu(threads: int, options: Options, whole: bool) -> list[Row]:
    """Reading by so many threads; the products of all of them once."""
    with Team(options.cores[:threads] if options.cores else None, threads) as team, team.seat():
        memory = ceilings.aligned(READ_BYTES)
        memory[:] = 1
        measure.read_bytes_s(team, memory)
        rows = [row("DRAM read", "GB/s", [measure.read_bytes_s(team, memory) / 1e9 for _ in range(REPEATS)], threads)]
        if not whole:
            return rows
        isa = cpu.isa()
        named = {"avx2": "maddubs", "generic": "32-bit multiplications"}.get(isa, "vpdpbusd")
        for text, int8 in ((f"int8 products, {named}", True), ("float32 products, fma", False)):
            rows.append(row(text, "TOPS", [ceilings.vector_ops_s(team, isa, int8) / 1e12 for _ in range(REPEATS)], threads))
        if isa == "amx" and tiles.permitted():
            for text, bf16 in (("AMX bf16 tiles", True), ("AMX int8 tiles", False)):
                rows.append(row(text, "TOPS", [ceilings.tile_ops_s(team, bf16) / 1e12 for _ in range(REPEATS)], threads))
    return rows


def on_gpu(index: int) -> list[Row]:
    """PCIe both ways from pinned and from pageable memory, the card's own copy, and its products."""
    where, size = torch.device("cuda", index), 256 << 20
    here = {"pinned": torch.empty(size, dtype=torch.uint8, pin_memory=True), "pageable": torch.ones(size, dtype=torch.uint8)}
    there, other = (torch.empty(size, dtype=torch.uint8, device=where) for _ in range(2))
    a = torch.randn(8192, 8192, device=where).to(torch.float16)
    works: list[tuple[str, str, float, Any]] = [
        *((f"host to GPU, {name}", "GB/s", size / 1e9, lambda m=m: there.copy_(m, non_blocking=True)) for name, m in here.items()),
        *((f"GPU to host, {name}", "GB/s", size / 1e9, lambda m=m: m.copy_(there, non_blocking=True)) for name, m in here.items()),
        ("GPU memory copy, read and written", "GB/s", 2 * size / 1e9, lambda: other.copy_(there)),
        ("GPU products, fp16 8192³", "TOPS", 2 * 8192 ** 3 / 1e12, lambda: torch.mm(a, a))]
    return [row(what, unit, [amount / seconds(work, where) for _ in range(REPEATS)]) for what, unit, amount, work in works]


def seconds(work: Any, where: torch.device) -> float:
    """By the card's own clock, after one to warm up."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(where):
        work()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize(where)
    return begin.elapsed_time(end) / 1e3
