"""Which published models fit this machine, from a small table of their sizes; knows no file and asks nobody.

Each row's numbers follow from its published config: billions of parameters in routed experts (all, and per token), in everything else,
and in the embedding table; bytes of KV per token in 16 bits, in layers that see everything.
"""

from dataclasses import dataclass

from hetero.memory.cost import EXPERT_SHARE, VRAM_SHARE, Machine

GiB, BILLION = 1 << 30, 1e9
INT4, INT8, BF16 = 4.5 / 8, 8.5 / 8, 2.0                     # bytes per weight, scales included
TOKENS = 8192                                                # of context that each suggestion has room for


@dataclass(frozen=True)
class Known:
    """A published model by hub name. Parameters in billions; kv in bytes per token."""

    name: str
    routed: float
    routed_active: float
    rest: float
    embedding: float
    kv: int


KNOWN = (
    Known("ibm-granite/granite-3.1-1b-a400m-instruct", 1.21, 0.30, 0.13, 0.05, 49152),
    Known("ibm-granite/granite-3.1-3b-a800m-instruct", 3.02, 0.60, 0.28, 0.08, 65536),
    Known("allenai/OLMoE-1B-7B-0125-Instruct", 6.44, 0.81, 0.48, 0.10, 131072),
    Known("Qwen/Qwen1.5-MoE-A2.7B-Chat", 12.46, 0.83, 1.86, 0.31, 196608),
    Known("deepseek-ai/DeepSeek-V2-Lite-Chat", 14.39, 1.35, 1.32, 0.21, 31104),
    Known("moonshotai/Moonlight-16B-A3B-Instruct", 14.39, 1.35, 1.57, 0.34, 31104),
    Known("openai/gpt-oss-20b", 19.12, 2.39, 1.80, 0.58, 24576),
    Known("baidu/ERNIE-4.5-21B-A3B-PT", 20.38, 1.91, 1.45, 0.26, 57344),
    Known("zai-org/GLM-4.7-Flash", 27.78, 1.74, 2.16, 0.32, 54144),
    Known("Qwen/Qwen3-30B-A3B-Instruct-2507", 28.99, 1.81, 1.54, 0.31, 98304),
    Known("Qwen/Qwen3-Coder-30B-A3B-Instruct", 28.99, 1.81, 1.54, 0.31, 98304),
    Known("Qwen/Qwen3.5-35B-A3B", 32.21, 1.01, 2.45, 0.51, 20480),
    Known("microsoft/Phi-3.5-MoE-instruct", 40.27, 5.03, 1.61, 0.13, 131072),
    Known("mistralai/Mixtral-8x7B-Instruct-v0.1", 45.10, 11.27, 1.60, 0.13, 131072),
    Known("Qwen/Qwen3-Next-80B-A3B-Instruct", 77.31, 1.51, 2.36, 0.31, 24576),
    Known("tencent/Hunyuan-A13B-Instruct", 77.31, 9.66, 3.08, 0.52, 131072),
    Known("zai-org/GLM-4.5-Air", 99.66, 6.23, 7.19, 0.62, 188416),
    Known("openai/gpt-oss-120b", 114.70, 3.58, 2.13, 0.58, 36864),
    Known("MiniMaxAI/MiniMax-M2", 224.68, 7.02, 4.01, 0.61, 253952),
    Known("Qwen/Qwen3-235B-A22B-Instruct-2507", 227.10, 14.19, 7.99, 0.62, 192512),
    Known("zai-org/GLM-4.6", 335.96, 16.80, 16.84, 0.78, 376832),
    Known("deepseek-ai/DeepSeek-V3.1", 653.91, 20.43, 17.12, 0.93, 70272),
    Known("moonshotai/Kimi-K2-Instruct-0905", 1014.69, 21.14, 11.72, 1.17, 70272),
)


@dataclass(frozen=True)
class Suggestion:
    """What a known model needs here, and the decode speed that the cost model's largest terms give."""

    name: str
    fits: bool
    ram_bytes: int
    vram_bytes: int
    decode_tok_s: float
    why_not: str = ""


def suggest(machine: Machine) -> list[Suggestion]:
    """Every known model on this machine, with 4-bit experts and 8k tokens of context: what fits first, the largest first."""
    found = [_weigh(known, machine) for known in KNOWN]
    return sorted(found, key=lambda s: (not s.fits, -s.ram_bytes if s.fits else s.ram_bytes))


def _weigh(known: Known, machine: Machine) -> Suggestion:
    experts, kv, dram = known.routed * BILLION * INT4, known.kv * TOKENS, machine.dram_bytes_s * EXPERT_SHARE
    routed, each = known.routed_active * BILLION * INT4, machine.expert_bytes_s or dram
    if machine.vram_bytes:
        dense = known.embedding * BILLION * BF16 + (known.rest - known.embedding) * BILLION * INT8
        ram, vram = experts + GiB, dense + kv + 1.6 * GiB
        seconds = routed / each + dense / (machine.vram_bytes_s * VRAM_SHARE)
    else:
        ram, vram = experts + known.rest * BILLION * BF16 + kv + GiB, 0.0
        seconds = routed / each + (known.rest - known.embedding) * BILLION * BF16 / dram
    short = [f"{what} {(need - have) / GiB:.0f} GiB short" for what, need, have in
             (("system memory", ram, machine.ram_bytes), ("GPU memory", vram, machine.vram_bytes)) if need > have]
    return Suggestion(known.name, not short, int(ram), int(vram), 1 / seconds, ", ".join(short))


def lines(machine: Machine, most: int = 12) -> list[str]:
    """The table as text: what fits, largest first, then what comes next."""
    rows = suggest(machine)
    fitting = [s for s in rows if s.fits][:most]
    shown = fitting + [s for s in rows if not s.fits][:max(2, most - len(fitting))]
    out = [f"{'model':46} {'system memory':>14} {'GPU memory':>11} {'decode':>12}"]
    for s in shown:
        gpu = f"{s.vram_bytes / GiB:.1f} GiB" if s.vram_bytes else "-"
        out.append(f"{s.name:46} {s.ram_bytes / GiB:10.1f} GiB {gpu:>11} {s.decode_tok_s:6.1f} tok/s" + (f"   {s.why_not}" if s.why_not else ""))
    return out
