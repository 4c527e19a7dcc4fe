"""What this machine's CPU is: instruction sets, cores, SMT siblings, quota, affinity, NUMA nodes; knows no kernel and starts no thread.

Everything is read from /proc, /sys and the affinity mask below a root that tests replace. Instruction sets come from LLVM (what the
kernels are compiled for), so NUMBA_CPU_NAME / NUMBA_CPU_FEATURES restrict them too.
"""

import fcntl
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numba.core.config as numba_config
from llvmlite import binding

ISAS = ("generic", "avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx")

_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"}
_NEEDS: dict[str, set[str]] = {
    "generic": set(), "avx2": _AVX2, "avx_vnni": _AVX2 | {"avxvnni"}, "avx512_vnni": _AVX512,
    "avx512_bf16": _AVX512 | {"avx512bf16"}, "amx": _AVX512 | {"avx512bf16", "amx-tile", "amx-int8", "amx-bf16"},
}


def features() -> frozenset[str]:
    """LLVM names of what kernels may use here: the host's features, or the ones that Numba was told to target."""
    told = numba_config.CPU_FEATURES
    if told is not None:
        return frozenset(word[1:] for word in str(told).split(",") if word.startswith("+"))
    if numba_config.CPU_NAME == "generic":
        return frozenset()
    return frozenset(name for name, here in binding.get_host_cpu_features().items() if here)


def amd() -> bool:
    """AMD cores read two long streams of memory faster than four that jump (measured on Zen 5); Intel ones four (Sapphire Rapids)."""
    return "sse4a" in features()


def isas(have: Iterable[str] | None = None) -> tuple[str, ...]:
    """The instruction sets, weakest first, that this CPU (or a CPU with the features `have`) can run."""
    there = features() if have is None else frozenset(have)
    return tuple(name for name in ISAS if _NEEDS[name] <= there)


def isa(cap: str | None = None) -> str:
    """The strongest usable instruction set; `cap` (default: HETERO_ISA) names one to use instead.

    Raises ValueError when the named one is unknown or this CPU lacks it."""
    wanted = os.environ.get("HETERO_ISA", "") if cap is None else cap
    here = isas()
    if not wanted:
        return here[-1]
    if wanted not in here:
        what = "this CPU lacks it" if wanted in ISAS else "there is no such instruction set"
        raise ValueError(f"HETERO_ISA={wanted}: {what}; usable here: {', '.join(here)}")
    return wanted


@dataclass(frozen=True)
class Cpu:
    """One machine as a process sees it. `cores`: SMT siblings per physical core, inside the affinity mask, fast cores first;
    `quota`: CPUs' worth of time per wall second (cgroup), None when unlimited; `nodes`: CPUs per NUMA node, inside the mask."""

    name: str
    allowed: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    slow: tuple[int, ...]
    quota: float | None
    nodes: tuple[tuple[int, ...], ...]
    online: int

    @property
    def fast(self) -> tuple[tuple[int, ...], ...]:
        """Physical cores without the efficiency cores of a hybrid CPU (all of them where there is only one kind)."""
        return tuple(core for core in self.cores if core[0] not in self.slow) or self.cores

    @property
    def threads(self) -> int:
        """Default size of a team: physical cores within affinity and quota, one left for Python and CUDA when more than four."""
        n = len(self.fast)
        if self.quota is not None:
            n = min(n, max(1, int(self.quota)))
        return n - 1 if n > 4 else n

    @property
    def reason(self) -> str:
        """Why `threads` is what it is, in words."""
        words = [f"{len(self.fast)} physical cores"]
        if len(self.allowed) < self.online:
            words.append(f"affinity allows {len(self.allowed)} of {self.online} CPUs")
        if len(self.allowed) > len(self.cores):
            words.append(f"{len(self.allowed) - len(self.cores)} SMT siblings not used")
        if len(self.fast) < len(self.cores):
            words.append(f"{len(self.cores) - len(self.fast)} efficiency cores not used")
        full = len(self.fast)
        if self.quota is not None and self.quota < full:
            full = max(1, int(self.quota))
            words.append(f"cgroup quota {self.quota:g}")
        if full > 4:
            words.append("one left for Python and CUDA")
        return ", ".join(words)

    def pick(self, n: int) -> list[int]:
        """n CPUs for n threads: one per physical core, fast ones first, CPU 0's core last as it serves interrupts;
        SMT siblings, then sharing, only when n asks for more than there are cores."""
        cores = sorted(self.cores, key=lambda core: (core[0] in self.slow, 0 in core))
        order = [core[i] for i in range(max(map(len, cores))) for core in cores if i < len(core)]
        return [order[i % len(order)] for i in range(n)]


def read(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> Cpu:
    """Reads the machine below `root`; `affinity` replaces this process's mask (tests)."""
    allowed = tuple(sorted(os.sched_getaffinity(0) if affinity is None else affinity))
    base = root / "sys/devices/system/cpu"
    cores: dict[tuple[int, ...], None] = {}
    for cpu in allowed:
        listed = _text(base / f"cpu{cpu}/topology/thread_siblings_list") or _text(base / f"cpu{cpu}/topology/core_cpus_list")
        siblings = tuple(c for c in (_cpus(listed) or [cpu]) if c in allowed)
        cores[siblings or (cpu,)] = None
    slow = tuple(c for c in _cpus(_text(root / "sys/devices/cpu_atom/cpus")) if c in allowed)
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:]))
    nodes = [tuple(c for c in _cpus(_text(folder / "cpulist")) if c in allowed) for folder in folders]
    online = _cpus(_text(base / "online"))
    return Cpu(name=_name(root), allowed=allowed, cores=tuple(cores), slow=slow, quota=quota(root),
               nodes=tuple(node for node in nodes if node) or (allowed,), online=max(len(online), len(allowed)))


def quota(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota on the way from this process's cgroup to the root, v1 or v2, in CPUs; None when there is none."""
    found: list[float] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and controllers == "":
            mounts, read_one = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], _quota_v2
        elif "cpu" in controllers.split(","):
            mounts, read_one = ["sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpuacct,cpu"], _quota_v1
        else:
            continue
        for mount in mounts:
            here = Path(path.lstrip("/"))
            for folder in (here, *here.parents):
                value = read_one(root / mount / folder)
                if value is not None:
                    found.append(value)
    return min(found, default=None)


def _quota_v2(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    limit, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not limit or not period or int(limit) <= 0:
        return None
    return int(limit) / int(period)


def _name(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        if line.lower().startswith(("model name", "cpu model")):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:                                  # files that a kernel or a container does not show are simply unknown
        return ""


def _cpus(text: str) -> list[int]:
    """"0-2,5" -> [0, 1, 2, 5]"""
    out: list[int] = []
    for part in filter(None, text.replace("\n", ",").split(",")):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


class Hold:
    """Cores that this process has taken, by one locked file each; the system frees them when the process ends.

    `shared` is true when some core is also held by somebody else: then two teams run on it, and the report says so."""

    def __init__(self, cores: Sequence[int], shared: bool, files: list[int]) -> None:
        self.cores, self.shared, self._files = tuple(cores), shared, files

    def release(self) -> None:
        """Gives the cores back; may be called again."""
        while self._files:
            os.close(self._files.pop())


def hold(wanted: Sequence[int], count: int, folder: Path = Path("/tmp/hetero-cores")) -> Hold:
    """Takes `count` of the CPUs in `wanted` (in order of preference), free ones first; fewer when only some are free, and shares
    them all when none is. Where locks cannot be kept (read-only /tmp) cores count as free."""
    free: list[int] = []
    files: list[int] = []
    for cpu in dict.fromkeys(wanted):
        if len(free) == count:
            break
        state, file = _lock(folder, cpu)
        if state:
            free.append(cpu)
        if file is not None:
            files.append(file)
    if free:
        return Hold(free, shared=False, files=files)
    return Hold(list(wanted)[:count], shared=True, files=files)


def _lock(folder: Path, cpu: int) -> tuple[bool, int | None]:
    path = folder / f"core-{cpu}"
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o1777)
        # a file another user made in a sticky folder may be opened, but not with O_CREAT (fs.protected_regular)
        file = os.open(path, flags if path.exists() else flags | os.O_CREAT, 0o666)
    except OSError:
        return True, None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return False, None
    return True, file
