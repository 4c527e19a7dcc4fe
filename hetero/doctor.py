"""Tells what this machine is to hetero and what stands in its way: one row per fact, with the remedy; changes nothing and loads no model."""

import importlib.metadata
import json
import platform
import resource
import shutil
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hetero import __version__
from hetero.errors import HeteroError
from hetero.options import Options

OK, NOTE, PROBLEM = "ok", "note", "problem"
PACKAGES = ("torch", "triton", "transformers", "numba", "llvmlite", "numpy", "safetensors", "tokenizers", "huggingface-hub", "llguidance")
NEEDED = ("torch", "transformers", "numba", "numpy", "safetensors", "tokenizers", "huggingface-hub")


@dataclass(frozen=True)
class Row:
    """One fact. `remedy` says what to do when `state` is not ok."""

    section: str
    name: str
    value: str
    state: str = OK
    remedy: str = ""


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.0f} MiB"


def system() -> list[Row]:
    wsl = "microsoft" in platform.release().lower()
    here = platform.system() == "Linux"
    rows = [Row("system", "hetero", __version__), Row("system", "system", f"{platform.system()} {platform.release()}{' (WSL2)' if wsl else ''}",
                                                      OK if here else PROBLEM, "" if here else "hetero runs on Linux and in WSL2"),
            Row("system", "python", f"{platform.python_version()} ({sys.executable})")]
    for name in PACKAGES:
        try:
            rows.append(Row("system", name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append(Row("system", name, "not installed", PROBLEM if name in NEEDED else NOTE, f"pip install {name}"))
    return rows


def cpu() -> list[Row]:
    from cpu_kernels import cpu as machine

    found = machine.read()
    rows = [Row("cpu", "name", found.name), Row("cpu", "threads", f"{found.threads}: {found.reason}"),
            Row("cpu", "cgroup quota", "none" if found.quota is None else f"{found.quota:g} CPUs", OK if found.quota is None else NOTE,
                "" if found.quota is None else "raise the container's CPU limit for more threads"),
            Row("cpu", "NUMA nodes", str(len(found.nodes)), OK if len(found.nodes) == 1 else NOTE,
                "" if len(found.nodes) == 1 else "bind to one node (numactl -N 0 -m 0) when the model fits it")]
    try:
        used = machine.isa()
        rows.append(Row("cpu", "instruction sets", f"{', '.join(machine.isas())}; used: {used}", NOTE if used == "generic" else OK,
                        "kernels run without vectors: slow (unset HETERO_ISA, or use a CPU with AVX2)" if used == "generic" else ""))
    except ValueError as e:
        rows.append(Row("cpu", "instruction sets", str(e), PROBLEM, "unset HETERO_ISA"))
    return rows


def memory() -> list[Row]:
    import psutil

    found, limit = psutil.virtual_memory(), cgroup_limit()
    usable = min(found.total, limit) if limit else found.total
    rows = [Row("memory", "RAM", f"{gib(found.total)}, {gib(found.available)} available"),
            Row("memory", "cgroup limit", gib(limit) if limit else "none", NOTE if limit and limit < found.total else OK,
                "raise the container's memory limit for larger models" if limit and limit < found.total else "")]
    swap = psutil.swap_memory()
    rows.append(Row("memory", "swap used", gib(swap.used), NOTE if swap.used > usable // 20 else OK,
                    "experts that are swapped out make decoding crawl: free memory first" if swap.used > usable // 20 else ""))
    huge = _text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    mode = huge.partition("[")[2].partition("]")[0] or "unknown"
    rows.append(Row("memory", "huge pages", mode, NOTE if mode == "never" else OK,
                    "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled" if mode == "never" else ""))
    return rows


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """The smallest memory limit on the way from this process's cgroup to the root, v1 or v2, in bytes; None when there is none."""
    found: list[int] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, place = line.split(":", 2)
        v2 = number == "0" and not controllers
        if not v2 and "memory" not in controllers.split(","):
            continue
        base, name = (root / "sys/fs/cgroup", "memory.max") if v2 else (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes")
        here = Path(place.lstrip("/"))
        for folder in (here, *here.parents):
            text = _text(base / folder / name)
            if text.isdigit() and int(text) < 1 << 60:       # v1 writes "no limit" as a huge number
                found.append(int(text))
    return min(found, default=None)


def limits() -> list[Row]:
    def spoken(value: int) -> str:
        return "unlimited" if value == resource.RLIM_INFINITY else gib(value) if value > 1 << 20 else str(value)

    lock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    low = lock != resource.RLIM_INFINITY and lock < 1 << 30
    return [Row("limits", "locked memory", spoken(lock), NOTE if low else OK,
                "only for mlock; pinning for the GPU does not need it: ulimit -l unlimited" if low else ""),
            Row("limits", "open files", spoken(files), NOTE if files < 1024 else OK, "ulimit -n 4096" if files < 1024 else ""),
            Row("limits", "address space", spoken(space), OK if space == resource.RLIM_INFINITY else PROBLEM,
                "" if space == resource.RLIM_INFINITY else "ulimit -v unlimited")]


def gpu() -> list[Row]:
    from hetero.gpu import visible

    facts = visible.gather()
    verdict = visible.judge(facts)
    rows = [Row("gpu", "torch", f"{facts.torch}, CUDA {facts.cuda or 'none: a CPU build'}")]
    if facts.driver:
        rows.append(Row("gpu", "driver", facts.driver))
    rows += [Row("gpu", f"device {i}", f"{name}, compute capability {major}.{minor}")
             for i, (name, (major, minor)) in enumerate(zip(facts.names, facts.capabilities, strict=True))]
    state = OK if verdict.usable else PROBLEM if verdict.seen else NOTE
    return [*rows, Row("gpu", "used", "yes" if verdict.usable else f"no: {verdict.why}", state, verdict.remedy)]


def folders(options: Options, state: Path) -> list[Row]:
    from huggingface_hub import constants

    rows = []
    for name, folder in (("cache", options.cache_dir), ("state", state), ("hub downloads", Path(constants.HF_HUB_CACHE))):
        there = next(p for p in (folder, *folder.parents) if p.exists())
        good = writable(there)
        free = shutil.disk_usage(there).free
        rows.append(Row("folders", name, f"{folder}: {'writable' if good else 'not writable'}, {gib(free)} free", OK if good else NOTE,
                        "" if good else {"cache": "name another one: --cache-dir DIR", "state": "set XDG_STATE_HOME: no history is kept",
                                         "hub downloads": "set HF_HOME to a folder that can be written"}[name]))
    return rows


def writable(folder: Path) -> bool:
    """Whether a file can be made there (asked by making one: mode bits do not tell of read-only mounts)."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def kernels() -> list[Row]:
    """Runs the routed layer in a format of each kind of tile on random experts against its float64 twin; what serves is tested when it is loaded."""
    from cpu_kernels import FORMATS, Act, ExpertLayer, ExpertStore, Team, plain

    rng = np.random.default_rng(0)
    experts, hidden, inter, top, tokens = 4, 128, 64, 2, 3
    x = rng.standard_normal((tokens, hidden), dtype=np.float32)
    ids = np.stack([rng.permutation(experts)[:top] for _ in range(tokens)]).astype(np.int32)
    weights = np.full((tokens, top), 1 / top, np.float32)
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    act, rows = Act(), []
    with closing(Team()) as team:
        for form in (FORMATS[name] for name in ("f32", "bf16", "int8_g32", "int4_g32", "mxfp4", "q6_k")):
            store = ExpertStore(form, experts, hidden, inter)
            for e in range(experts):
                gate, up, down = (rng.standard_normal(s, dtype=np.float32) / np.float32(np.sqrt(s[1])) for s in shapes)
                store.put(e, gate, up, down)
            out = np.empty((tokens, hidden), np.float32)
            ExpertLayer(store, act).run(x, ids, weights, out, team)
            packed = {e: tuple(store.dequantize(e, n) for n in ("gate", "up", "down")) for e in range(experts)}
            want = plain.moe(form, x, ids, weights, packed.__getitem__, (act.kind, act.alpha, act.limit, act.up_shift), rounded=True)
            error = float(np.abs(out - want).max() / np.abs(want).max())
            good = error < 0.02
            rows.append(Row("kernels", form.name, f"differs from its twin by {error:.1e} of the largest value", OK if good else PROBLEM,
                            "" if good else "this kernel is wrong on this CPU: HETERO_ISA=generic, and please report it"))
    return rows


def look(options: Options, state: Path) -> list[Row]:
    """Every row. A section that cannot be looked at becomes one row that says why."""
    rows: list[Row] = []
    sections = (system, cpu, memory, limits, gpu, lambda: folders(options, state), kernels)
    for name, section in zip(("system", "cpu", "memory", "limits", "gpu", "folders", "kernels"), sections, strict=True):
        try:
            rows += section()
        except (HeteroError, OSError, ImportError, ValueError, RuntimeError) as e:
            rows.append(Row(name, name, f"could not be looked at: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}", PROBLEM,
                            "reinstall hetero in a fresh environment"))
    return rows


def show(rows: list[Row], as_json: bool) -> int:
    """Prints the rows; 1 when one is a problem."""
    broken = any(r.state == PROBLEM for r in rows)
    if as_json:
        print(json.dumps({"ok": not broken, "rows": [asdict(r) for r in rows]}, indent=1))
        return int(broken)
    section = ""
    for r in rows:
        if r.section != section:
            section = r.section
            print(f"\n{section}" if rows[0] is not r else section)
        print(f"  {({OK: ' ', NOTE: '·', PROBLEM: '!'}[r.state])} {r.name:18} {r.value}" + (f"\n  {'':20} -> {r.remedy}" if r.remedy else ""))
    print("\n" + ("something stands in the way: see the lines with !" if broken else "all well"))
    return int(broken)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
