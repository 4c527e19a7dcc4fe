"""Whether this machine has an NVIDIA GPU, whether this torch can use it, and if not the exact remedy; computes nothing on it.

Facts are gathered once into a record; the verdict is a function of that record alone. Driver floors are NVIDIA's minor-version compatibility
table (CUDA 12.x: 525, 13.x: 580; docs.nvidia.com/deploy/cuda-compatibility).
"""

import re
from dataclasses import dataclass
from pathlib import Path

LOWEST = (7, 5)                              # compute capability that our kernels are compiled for
INDEX = "https://download.pytorch.org/whl/"
DRIVERS = {12: 525, 13: 580}


@dataclass(frozen=True)
class Facts:
    """What can be seen. `pci`: NVIDIA display devices on the bus; `nodes`: device files; `arches`: what this torch was built for."""

    pci: int = 0
    nodes: tuple[str, ...] = ()
    wsl: bool = False
    driver: str = ""
    torch: str = ""
    cuda: str = ""                           # the CUDA this torch was built with, "" for CPU-only builds
    hidden: bool = False                     # CUDA_VISIBLE_DEVICES hides every GPU
    names: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()
    arches: tuple[str, ...] = ()
    fault: str = ""                          # what torch says when it cannot start CUDA


@dataclass(frozen=True)
class Verdict:
    """`usable`: run on it. `seen`: there is one. `why` and `remedy`: one line each, "" when nothing is wrong."""

    usable: bool
    seen: bool
    why: str
    remedy: str = ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def gather(root: Path = Path("/"), ask_torch: bool = True) -> Facts:
    """Reads /sys, /proc and /dev below `root`, and asks torch (which starts CUDA where it can)."""
    devices = [d for d in (root / "sys/bus/pci/devices").glob("*") if _text(d / "vendor") == "0x10de" and _text(d / "class").startswith("0x03")]
    nodes = tuple(sorted(p.name for p in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia(\d+|ctl|-uvm)", p.name)))
    wsl = (root / "dev/dxg").exists()
    version = re.search(r"(?:Kernel Module|x86_64|aarch64)\s+(\d+\.\d+(?:\.\d+)?)", _text(root / "proc/driver/nvidia/version"))
    found = Facts(len(devices), nodes, wsl, version[1] if version else "")
    return _ask(found) if ask_torch else found


def _ask(found: Facts) -> Facts:
    import warnings
    from dataclasses import replace

    import torch

    fault, names, capabilities, arches = "", [], [], []
    with warnings.catch_warnings(record=True) as said:   # torch warns about GPUs that it was not built for: `judge` says it better
        warnings.simplefilter("always")
        try:
            if torch.version.cuda and torch.cuda.is_available():
                torch.cuda.init()
                names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
                capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
                arches = torch.cuda.get_arch_list()
        except RuntimeError as e:
            fault = str(e).splitlines()[0]
    if not names and said and not fault:
        fault = str(said[0].message).splitlines()[0]
    hidden = bool(torch.version.cuda) and not fault and not names and bool(found.nodes)
    return replace(found, torch=torch.__version__, cuda=torch.version.cuda or "", names=tuple(names), capabilities=tuple(capabilities),
                   arches=tuple(arches), fault=fault, hidden=hidden)


def wheel(driver: str) -> str:
    """The torch wheel index that this driver can run."""
    major = int(driver.split(".")[0]) if driver else 0
    return INDEX + ("cu126" if 0 < major < DRIVERS[13] else "cu130")


def judge(f: Facts) -> Verdict:
    """From what is seen to one line of why and what to do."""
    seen = bool(f.pci or f.nodes or f.driver or f.names or (f.wsl and f.fault))
    major = int(f.driver.split(".")[0]) if f.driver else 0
    install = f"pip install --force-reinstall torch --index-url {wheel(f.driver)}"
    if f.names:
        return _judge_device(f, install)
    if not seen:
        return Verdict(False, False, "no NVIDIA GPU is visible" + (" (WSL: install the NVIDIA driver in Windows)" if f.wsl else ""))
    if f.pci and not f.nodes and not f.wsl and not f.driver:
        return Verdict(False, True, "an NVIDIA GPU is on the bus, but its driver is not loaded",
                       "install NVIDIA's driver (Ubuntu: sudo ubuntu-drivers install) and restart; in a container: start it with --gpus all")
    if not f.nodes and not f.wsl:
        return Verdict(False, True, "the NVIDIA driver is loaded, but there is no /dev/nvidia*",
                       "in a container: start it with --gpus all; else: sudo nvidia-modprobe -u -c0")
    if not f.cuda:
        return Verdict(False, True, f"torch {f.torch} is a CPU-only build", install)
    need = DRIVERS.get(int(f.cuda.split(".")[0]), 0)
    if major and major < need:
        return Verdict(False, True, f"driver {f.driver} is too old for torch {f.torch} (CUDA {f.cuda} needs {need} or newer)",
                       f"update the driver to {need} or newer" + (f", or {install}" if major >= DRIVERS[12] else ""))
    if f.hidden:
        return Verdict(False, True, "torch sees no GPU although /dev/nvidia* is there",
                       "unset CUDA_VISIBLE_DEVICES, or check the rights on /dev/nvidia*")
    return Verdict(False, True, f"torch cannot start CUDA: {f.fault or 'no reason given'}",
                   "run nvidia-smi: when it fails too, restart or reinstall the driver")


def _judge_device(f: Facts, install: str) -> Verdict:
    best = max(f.capabilities)
    spoken = f"{best[0]}.{best[1]}"
    if best < LOWEST:
        return Verdict(False, True, f"{f.names[0]} has compute capability {spoken}, below {LOWEST[0]}.{LOWEST[1]}",
                       "use --device cpu; the oldest cards that work are Turing (RTX 20, GTX 16, T4)")
    built = {int(a.split("_")[1].rstrip("af")) for a in f.arches if a.startswith(("sm_", "compute_"))}
    exact = any(b // 10 == best[0] and b % 10 <= best[1] for b in built)
    forward = any(a.startswith("compute_") and int(a.split("_")[1].rstrip("af")) <= best[0] * 10 + best[1] for a in f.arches)
    if built and not exact and not forward:
        return Verdict(False, True, f"torch {f.torch} has no code for {f.names[0]} (sm_{best[0]}{best[1]}; it has {', '.join(f.arches)})", install)
    return Verdict(True, True, "")


def look() -> Verdict:
    """The verdict on this machine, now."""
    return judge(gather())
