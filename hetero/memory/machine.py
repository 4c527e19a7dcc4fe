"""What this machine can do, as the numbers that planning needs: memory that may be taken, the GPU, and rates measured once; decides nothing.

Memory is what is free now within the cgroup's limit. Rates are measured in about a second, kept in the cache folder under a key of CPU,
GPU and versions, and measured anew when that key changes.
"""

import hashlib
import json
import os
import time
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpu_kernels import Act, ExpertLayer, ExpertStore, Team, ceilings, cpu
from hetero.gpu import visible
from hetero.memory.cost import Machine

MiB, GiB = 1 << 20, 1 << 30
RATES = ("dram_bytes_s", "expert_bytes_s", "cpu_flops", "vram_bytes_s", "gpu_flops", "pcie_bytes_s")


def ram_available(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: MemAvailable, bounded by each cgroup limit on the way up less what is in use and not reclaimable."""
    rows = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    free = [int(rows[key].split()[0]) << 10 for key in ("MemAvailable", "MemFree") if key in rows][:1] or [4 * GiB]
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        names = ("memory.max", "memory.current", "inactive_file") if number == "0" else \
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        base = root / "sys/fs/cgroup" / ("" if number == "0" else "memory")
        here = Path(path.lstrip("/"))
        for folder in (here, *here.parents):
            limit, used = _text(base / folder / names[0]), _text(base / folder / names[1])
            if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
                stat = dict(row.split() for row in _text(base / folder / "memory.stat").splitlines() if len(row.split()) == 2)
                free.append(int(limit) - int(used) + int(stat.get(names[2], 0)))
    return max(0, min(free))


def gpu_trouble(root: Path = Path("/")) -> tuple[str, str] | None:
    """(what is wrong, exact remedy) when an NVIDIA GPU is visible and torch cannot use it; None when it can, or when there is none."""
    verdict = visible.judge(visible.gather(root))
    return (verdict.why, verdict.remedy) if verdict.seen and not verdict.usable else None


def this_machine(cache_dir: Path | None = None, device: str = "auto", measure: bool = True, again: bool = False) -> Machine:
    """This machine as it is now. Rates come from the cache folder, else (or `again`) are measured, and kept there when it can be written."""
    here = cpu.read()
    index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else 0
    on_gpu = device != "cpu" and gpu_trouble() is None and torch.cuda.is_available()
    found = Machine(cores=here.threads, ram_bytes=ram_available(), dram_bytes_s=8e9 * min(here.threads, 8), cpu_flops=3e10 * here.threads,
                    numa_nodes=len(here.nodes), name=here.name, assumed=("dram_bytes_s", "cpu_flops"))
    if on_gpu:
        free, _ = torch.cuda.mem_get_info(index)
        found = replace(found, gpu=torch.cuda.get_device_name(index), vram_bytes=free, vram_bytes_s=3e11, gpu_flops=5e13, pcie_bytes_s=2e10,
                        assumed=("dram_bytes_s", "cpu_flops", "vram_bytes_s", "gpu_flops", "pcie_bytes_s"))
    key = hashlib.sha256(repr((found.name, found.gpu, here.threads, np.__version__, torch.__version__, cpu.isa(), 2)).encode()).hexdigest()[:16]
    file = cache_dir / f"machine-{key}.json" if cache_dir else None
    rates, busy = _remembered(file)
    busy_now = os.getloadavg()[0] > 0.75 * here.threads      # then figures are this moment's, and measured again when there is quiet
    if measure and (again or not rates or (busy and not busy_now)):
        rates, busy = _measure(here.threads, index if on_gpu else None), busy_now
        _remember(file, rates, busy)
    if busy:
        found = replace(found, name=f"{found.name} (measured while busy with other work)")
    return replace(found, **rates, assumed=tuple(n for n in found.assumed if n not in rates))


def _measure(threads: int, gpu: int | None) -> dict[str, Any]:
    """Rates by name, each the best of a few tries by the kernels themselves: DRAM read, experts of int4_g32 for one token and for many
    (2048 x 768, 64 tokens an expert), and with a GPU its memory, products and PCIe."""
    with Team() as team:
        memory = np.full(256 * MiB + 64, 1, np.uint8)
        memory = memory[-memory.ctypes.data % 64:][:256 * MiB]
        rates = {"dram_bytes_s": 256 * MiB / min(ceilings.read_s(team, memory, ahead) for ahead in (False, True) for _ in range(3))}
        del memory
        rates |= _measure_experts(team)
        rates["expert_bytes_s"] = min(rates["expert_bytes_s"], rates["dram_bytes_s"])       # a cache may have held them
    if gpu is not None:
        rates |= _measure_gpu(gpu)
        torch.cuda.empty_cache()
    return rates


def _measure_experts(team: Team, hidden: int = 2048, inter: int = 768, experts: int = 48, top_k: int = 8) -> dict[str, float]:
    store = ExpertStore("int4_g32", experts, hidden, inter)
    draw = np.random.default_rng(0)
    gate, up, down = (draw.standard_normal(shape, np.float32) for shape in ((inter, hidden), (inter, hidden), (hidden, inter)))
    store.put(0, gate, up, down)
    records = store.buffer.reshape(experts, -1)
    records[1:] = records[0]
    layer = ExpertLayer(store, Act())
    turn = count()

    def one() -> None:
        ids = ((np.arange(top_k) + next(turn) * top_k) % experts).astype(np.int32)[None]
        layer.run(x[:1], ids, np.full((1, top_k), 1 / top_k, np.float32), out[:1], team)

    def many() -> None:
        layer.run(x, (np.arange(64 * top_k, dtype=np.int32) % top_k)[:, None].copy(), np.ones((64 * top_k, 1), np.float32), out, team)
    x = draw.standard_normal((64 * top_k, hidden), np.float32)
    out = np.empty_like(x)
    return {"expert_bytes_s": top_k * store.record_nbytes / _best(one, 12), "cpu_flops": 2.0 * x.shape[0] * 3 * hidden * inter / _best(many, 3)}


def _measure_gpu(index: int) -> dict[str, float]:
    where = torch.device("cuda", index)
    host = torch.empty(256 * MiB, dtype=torch.uint8, pin_memory=True)
    big, other = (torch.empty(512 * MiB, dtype=torch.uint8, device=where) for _ in range(2))
    a = torch.ones(4096, 4096, dtype=torch.float16, device=where)

    def timed(work: Any) -> float:
        def whole() -> None:
            work()
            torch.cuda.synchronize(where)
        return _best(whole, 5)
    return {"pcie_bytes_s": 256 * MiB / timed(lambda: big[:256 * MiB].copy_(host, non_blocking=True)),
            "vram_bytes_s": 2 * 512 * MiB / timed(lambda: other.copy_(big)),
            "gpu_flops": 2 * 4096 ** 3 / timed(lambda: torch.mm(a, a)) * 0.6}       # the grouped products of small experts reach about this share


def _best(work: Any, tries: int) -> float:
    times = []
    for _ in range(tries + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _remembered(file: Path | None) -> tuple[dict[str, Any], bool]:
    """Rates as they were kept, and whether the machine was busy then; none when the file is missing or strange."""
    try:
        kept = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}, False
    rates = kept.get("rates", {}) if isinstance(kept, dict) else {}
    good = isinstance(rates, dict) and all(n in RATES and isinstance(v, float) and v > 0 for n, v in rates.items())
    return (rates, bool(kept.get("busy"))) if good else ({}, False)


def _remember(file: Path | None, rates: dict[str, float], busy: bool) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({"rates": rates, "busy": busy, "measured": time.strftime("%Y-%m-%d %H:%M:%S")}))
        fresh.replace(file)
    except OSError:                                      # a read-only cache folder only costs measuring again
        return


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:                                      # what a kernel or a container does not show is unknown
        return ""


def record(machine: Machine) -> dict[str, Any]:
    """The machine as JSON-safe data."""
    return asdict(machine)
