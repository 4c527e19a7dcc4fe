"""llama.cpp's CPU experts as a contender: the libraries that `llama-cpp-python` built here, driven through their C interface.

What is timed is what llama.cpp computes for a routed layer once the router has spoken (`build_moe_ffn`): mul_mat_id for gate and up, swiglu,
mul_mat_id for down, weights, sum over experts; as one graph of all calls, with llama.cpp's own repacked weights where it has a layout for the type.
Not timed: router, norms, attention, sampling. METHOD: q4_0, q4_k, q8_0 or bf16; with +plain, weights are not repacked.
"""

import ctypes as c
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peer

TYPES = {"f32": 0, "q4_0": 2, "q8_0": 8, "q4_k": 12, "i32": 26, "bf16": 30}
BITS = {"q4_0": 4.5, "q8_0": 8.5, "q4_k": 4.5, "bf16": 16.0}
P, Z, I = c.c_void_p, c.c_size_t, c.c_int64


class InitParams(c.Structure):
    _fields_ = (("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool))


def libraries() -> Any:
    """ggml's functions, with their types."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise ImportError("llama-cpp-python is not installed in this environment")
    folder = Path(found.origin).parent / "lib"
    parts = [c.CDLL(str(folder / f"lib{n}.so"), mode=c.RTLD_GLOBAL) for n in ("ggml-base", "ggml-cpu", "ggml")]

    class Functions:
        pass
    made = Functions()
    for name, result, arguments in (
            ("ggml_init", P, [InitParams]), ("ggml_free", None, [P]), ("ggml_new_tensor_2d", P, [P, c.c_int, I, I]),
            ("ggml_new_tensor_3d", P, [P, c.c_int, I, I, I]), ("ggml_mul_mat_id", P, [P, P, P, P]), ("ggml_swiglu_split", P, [P, P, P]),
            ("ggml_mul", P, [P, P, P]), ("ggml_add", P, [P, P, P]), ("ggml_view_2d", P, [P, P, I, I, Z, Z]),
            ("ggml_new_graph_custom", P, [P, Z, c.c_bool]), ("ggml_build_forward_expand", None, [P, P]),
            ("ggml_quantize_chunk", Z, [c.c_int, P, P, I, I, I, P]), ("ggml_backend_alloc_ctx_tensors_from_buft", P, [P, P]),
            ("ggml_backend_tensor_set", None, [P, P, Z, Z]), ("ggml_backend_tensor_get", None, [P, P, Z, Z]),
            ("ggml_backend_graph_compute", c.c_int, [P, P]), ("ggml_backend_buft_name", c.c_char_p, [P]),
            ("ggml_backend_dev_supports_op", c.c_bool, [P, P]), ("ggml_backend_reg_get_proc_address", P, [P, c.c_char_p]),
            ("ggml_backend_dev_backend_reg", P, [P]), ("ggml_backend_get_device", P, [P]), ("ggml_backend_cpu_buffer_type", P, []),
            ("ggml_backend_cpu_init", P, []), ("ggml_backend_cpu_set_n_threads", None, [P, c.c_int])):
        function = next(f for lib in parts if (f := getattr(lib, name, None)) is not None)
        function.restype, function.argtypes = result, arguments
        setattr(made, name, function)
    return made


class Llama:
    def __init__(self, method: str, threads: int, gib: float) -> None:
        type_name, _, plain = method.partition("+")
        self.g, self.type = libraries(), TYPES[type_name]
        self.backend = self.g.ggml_backend_cpu_init()
        self.g.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.device = self.g.ggml_backend_get_device(self.backend)
        self.plain_buffers = self.g.ggml_backend_cpu_buffer_type()
        self.expert_nbytes = 3 * peer.HIDDEN * peer.INTER * BITS[type_name] / 8
        self.layers = peer.layers_for(self.expert_nbytes, gib)
        where, named = (self.plain_buffers, "not repacked") if plain else self.weight_buffers()
        self.name = f"llama.cpp {type_name} ({named})"
        data = [self.quantized(i) for i in range(3)]
        self.stack = []
        for _ in range(self.layers):
            context = self.context()
            tensors = [self.g.ggml_new_tensor_3d(context, self.type, cols, rows, peer.EXPERTS)
                       for rows, cols in ((peer.INTER, peer.HIDDEN), (peer.INTER, peer.HIDDEN), (peer.HIDDEN, peer.INTER))]
            self.g.ggml_backend_alloc_ctx_tensors_from_buft(context, where)
            for tensor, matrix in zip(tensors, data, strict=True):
                self.g.ggml_backend_tensor_set(tensor, matrix.ctypes.data, 0, matrix.nbytes)
            self.stack.append(tensors)

    def context(self, nbytes: int = 1 << 20) -> int:
        return int(self.g.ggml_init(InitParams(nbytes, None, True)))

    def weight_buffers(self) -> tuple[int, str]:
        """Where llama.cpp itself would put such weights: the first of its extra buffer types that can multiply them, as its loader asks."""
        get = c.CFUNCTYPE(c.POINTER(P), P)(self.g.ggml_backend_reg_get_proc_address(self.g.ggml_backend_dev_backend_reg(self.device),
                                                                                  b"ggml_backend_dev_get_extra_bufts"))
        kinds = get(self.device)
        i = 0
        while kinds and kinds[i]:
            context = self.context()
            weights = self.g.ggml_new_tensor_3d(context, self.type, peer.HIDDEN, peer.INTER, peer.EXPERTS)
            self.g.ggml_backend_alloc_ctx_tensors_from_buft(context, kinds[i])
            other = self.context()
            x, ids = self.g.ggml_new_tensor_3d(other, TYPES["f32"], peer.HIDDEN, 1, 1), self.g.ggml_new_tensor_2d(other, TYPES["i32"], peer.TOP_K, 1)
            if self.g.ggml_backend_dev_supports_op(self.device, self.g.ggml_mul_mat_id(other, weights, x, ids)):
                return int(kinds[i]), self.g.ggml_backend_buft_name(kinds[i]).decode()
            i += 1
        return self.plain_buffers, "not repacked"

    def quantized(self, which: int) -> np.ndarray:
        """All experts of one matrix, as llama.cpp quantizes them."""
        made = []
        for k in range(peer.KINDS):
            w = np.ascontiguousarray(peer.drawn(k)[which])
            out = np.zeros(int(w.size * BITS[next(n for n, t in TYPES.items() if t == self.type)] // 8), np.uint8)
            assert self.g.ggml_quantize_chunk(self.type, w.ctypes.data, out.ctypes.data, 0, *w.shape, None) == out.nbytes
            made.append(out)
        return np.concatenate([made[e % peer.KINDS] for e in range(peer.EXPERTS)])

    def prepare(self, tokens: int, calls: int) -> Callable[[list[np.ndarray], np.ndarray, np.ndarray, int], np.ndarray]:
        made = {first: self.graph(tokens, calls, first) for first in range(self.layers)}

        def run(ids: list[np.ndarray], x: np.ndarray, weights: np.ndarray, first: int) -> np.ndarray:
            graph, inputs, last = made[first]
            for (a, b, w), each in zip(inputs, ids, strict=True):
                for tensor, data in ((a, x), (b, each), (w, weights)):
                    self.g.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
            if self.g.ggml_backend_graph_compute(self.backend, graph) != 0:
                raise RuntimeError("ggml_backend_graph_compute failed")
            out = np.empty((tokens, peer.HIDDEN), np.float32)
            self.g.ggml_backend_tensor_get(last, out.ctypes.data, 0, out.nbytes)
            return out
        return run

    def graph(self, tokens: int, calls: int, first: int) -> tuple[int, list[tuple[int, int, int]], int]:
        """The layers `first`, first + 1, … in one graph, inputs [(x, ids, weights)], and the last output."""
        g, context, inputs = self.g, self.context(64 << 20), []
        graph = g.ggml_new_graph_custom(context, 4096, False)
        out = 0
        for i in range(calls):
            gate_up_down = self.stack[(first + i) % self.layers]
            x = g.ggml_new_tensor_3d(context, TYPES["f32"], peer.HIDDEN, 1, tokens)
            ids = g.ggml_new_tensor_2d(context, TYPES["i32"], peer.TOP_K, tokens)
            weights = g.ggml_new_tensor_3d(context, TYPES["f32"], 1, peer.TOP_K, tokens)
            inputs.append((x, ids, weights))
            up = g.ggml_mul_mat_id(context, gate_up_down[1], x, ids)
            gate = g.ggml_mul_mat_id(context, gate_up_down[0], x, ids)
            experts = g.ggml_mul(context, g.ggml_mul_mat_id(context, gate_up_down[2], g.ggml_swiglu_split(context, gate, up), ids), weights)
            step = peer.HIDDEN * 4
            parts = [g.ggml_view_2d(context, experts, peer.HIDDEN, tokens, step * peer.TOP_K, k * step) for k in range(peer.TOP_K)]
            out = parts[0]
            for part in parts[1:]:
                out = g.ggml_add(context, out, part)
            g.ggml_build_forward_expand(graph, out)
        g.ggml_backend_alloc_ctx_tensors_from_buft(context, self.plain_buffers)
        return graph, inputs, out


def make(method: str, threads: int, gib: float) -> Llama:
    return Llama(method, threads, gib)
