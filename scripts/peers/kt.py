"""kt-kernel's CPU experts as a contender, through its extension's own interface (no transformers, no sglang).

METHOD: int4, int8 or bf16 (AMX: quantized by kt-kernel itself, scales per row), raw4 (AVX2 or AMX: 4 bits with a bf16 scale per 32).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import peer

CLASSES = {"int4": ("AMXInt4_MOE",), "int8": ("AMXInt8_MOE",), "bf16": ("AMXBF16_MOE", "AVX2BF16_MOE"),
           "raw4": ("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE")}
BITS = {"int4": 4.0, "int8": 8.0, "bf16": 16.0, "raw4": 4.5}
MOST_TOKENS = 2048


def extension() -> Any:
    """The extension for this CPU: by the package where it is whole, else as a module of its own."""
    try:
        import kt_kernel
        return kt_kernel.kt_kernel_ext
    except ImportError:
        import kt_kernel_ext
        return kt_kernel_ext


class Kt:
    def __init__(self, method: str, threads: int, gib: float) -> None:
        self.e = extension()
        names = [n for n in CLASSES[method] if hasattr(self.e.moe, n)]
        if not names:
            raise RuntimeError(f"this build of kt-kernel has none of {', '.join(CLASSES[method])} for this CPU")
        pool = self.e.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self.cpu, self.method, self.keep = self.e.CPUInfer(pool), method, []
        self.expert_nbytes = 3 * peer.HIDDEN * peer.INTER * BITS[method] / 8
        self.layers = peer.layers_for(self.expert_nbytes, gib)
        self.name = f"kt-kernel {method} ({names[0]})"
        self.drawn = [peer.drawn(k) for k in range(peer.KINDS)]
        self.whole: dict[str, np.ndarray] = {}           # until all layers have quantized it
        self.stack = [self.layer(getattr(self.e.moe, names[0])) for _ in range(self.layers)]
        self.whole.clear()

    def layer(self, kind: Any) -> Any:
        config = self.e.moe.MOEConfig(peer.EXPERTS, peer.TOP_K, peer.HIDDEN, peer.INTER, 0)
        config.pool, config.max_len, config.layer_idx = self.cpu.backend_, MOST_TOKENS, 0
        kept: list[np.ndarray] = []
        order = np.arange(peer.EXPERTS, dtype=np.int64)
        for i, name in enumerate(("gate", "up", "down")):
            drawn = [each[i] for each in self.drawn]
            if self.method == "raw4":
                packed = [grouped(w) for w in drawn]
                kept += [a for p in packed for a in p]
                setattr(config, f"{name}_projs", [[packed[e % peer.KINDS][0].ctypes.data for e in range(peer.EXPERTS)]])
                setattr(config, f"{name}_scales", [[packed[e % peer.KINDS][1].ctypes.data for e in range(peer.EXPERTS)]])
                config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 4, 32, False
            elif self.method == "bf16":
                kept += (mine := [peer.bf16(w) for w in drawn])
                setattr(config, f"{name}_projs", [[mine[e % peer.KINDS].ctypes.data for e in range(peer.EXPERTS)]])
                setattr(config, f"{name}_scales", [[0] * peer.EXPERTS])
            else:
                if name not in self.whole:
                    self.whole[name] = np.concatenate([peer.bf16(drawn[e % peer.KINDS])[None] for e in range(peer.EXPERTS)])
                setattr(config, f"{name}_proj", self.whole[name].ctypes.data)
        made = kind(config)
        self.cpu.submit(made.load_weights_task(order.ctypes.data))
        self.cpu.sync()
        self.keep.append((order, kept if self.method in ("raw4", "bf16") else None, config))
        return made

    def prepare(self, tokens: int, calls: int) -> Callable[[list[np.ndarray], np.ndarray, np.ndarray, int], np.ndarray]:
        count, out = np.array([tokens], np.int32), np.zeros((tokens, peer.HIDDEN), np.uint16)

        def run(ids: list[np.ndarray], x: np.ndarray, weights: np.ndarray, first: int) -> np.ndarray:
            half = peer.bf16(x)
            for i, each in enumerate(ids):
                wide = each.astype(np.int64)
                self.cpu.submit(self.stack[(first + i) % self.layers].forward_task(
                    count.ctypes.data, peer.TOP_K, wide.ctypes.data, weights.ctypes.data, half.ctypes.data, out.ctypes.data, False))
                self.cpu.sync()
            return (out.astype(np.uint32) << 16).view(np.float32)
        return run


def grouped(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N, K] -> nibbles q + 8 [N, K / 2], the even column low, and bf16 scales [N, K / 32]."""
    groups = w.reshape(w.shape[0], -1, 32)
    scales = np.abs(groups).max(-1) / 7
    half = peer.bf16(scales)
    q = np.clip(np.rint(groups / (half.astype(np.uint32) << 16).view(np.float32)[..., None]), -8, 7).astype(np.int8).reshape(w.shape)
    codes = (q + 8).astype(np.uint8)
    return np.ascontiguousarray(codes[:, 0::2] | (codes[:, 1::2] << 4)), np.ascontiguousarray(half)


def make(method: str, threads: int, gib: float) -> Kt:
    return Kt(method, threads, gib)
