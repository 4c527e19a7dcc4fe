"""transformers' own experts module as a contender, on the CPU in bfloat16 or float32. METHOD: bf16 or f32, +NAME for an experts implementation."""

from collections.abc import Callable

import numpy as np
import peer
import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class Transformers:
    def __init__(self, method: str, threads: int, gib: float) -> None:
        torch.set_num_threads(threads)
        name, _, how = method.partition("+")
        self.dtype = DTYPES[name]
        config = transformers.Qwen3MoeConfig(hidden_size=peer.HIDDEN, moe_intermediate_size=peer.INTER, num_experts=peer.EXPERTS,
                                             num_experts_per_tok=peer.TOP_K)
        config._experts_implementation = how or "grouped_mm"
        self.expert_nbytes = 3.0 * peer.HIDDEN * peer.INTER * self.dtype.itemsize
        self.layers = peer.layers_for(self.expert_nbytes, gib)
        self.name = f"transformers {name} ({config._experts_implementation})"
        kinds = [peer.drawn(k) for k in range(peer.KINDS)]
        self.stack = []
        for _ in range(self.layers):
            layer = Qwen3MoeExperts(config).to(self.dtype)
            with torch.no_grad():
                for e in range(peer.EXPERTS):
                    gate, up, down = (torch.from_numpy(m) for m in kinds[e % peer.KINDS])
                    layer.gate_up_proj[e] = torch.cat([gate, up])
                    layer.down_proj[e] = down
            self.stack.append(layer)

    def prepare(self, tokens: int, calls: int) -> Callable[[list[np.ndarray], np.ndarray, np.ndarray, int], np.ndarray]:
        @torch.inference_mode()
        def run(ids: list[np.ndarray], x: np.ndarray, weights: np.ndarray, first: int) -> np.ndarray:
            given, w = torch.from_numpy(x).to(self.dtype), torch.from_numpy(weights).to(self.dtype)
            out = given
            for i, each in enumerate(ids):
                out = self.stack[(first + i) % self.layers](given, torch.from_numpy(each).long(), w)
            return out.float().numpy()
        return run


def make(method: str, threads: int, gib: float) -> Transformers:
    return Transformers(method, threads, gib)
