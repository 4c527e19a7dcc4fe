"""A model's tensors, checked against its spec before anything is allocated, then read one matrix at a time; knows no kernel and no device."""

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cpu_kernels.formats import ORDERED
from hetero.arch import tensors as spec_tensors
from hetero.arch.gguf import ROWS
from hetero.arch.spec import GatedDeltaNet, Model, MoE, Tensor
from hetero.errors import BadCheckpoint, UnsupportedModel
from hetero.weights import dialects, ggml
from hetero.weights.layout import Layout, Piece
from hetero.weights.reading import Codes, Floats, Reading
from hetero.weights.source import Source, read_tensors
from hetero.weights.stored import Mapped, Stored, typed

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BITS_OF = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}
HARMLESS = re.compile(r"rotary_emb\.inv_freq$|\.(input_scale|input_global_scale|[qkv]_scale|kv_scale|output_scale|weight_shape)$")
PREFIXES = (("model.", "model.language_model."), ("model.", "language_model.model."), ("model.", ""))


@dataclass(frozen=True)
class ExpertWeights:
    """One routed expert as it arrives. gate [I, H] (None when not gated), up [I, H], down [H, I]; biases float32 or None."""

    gate: Floats | Codes | None
    up: Floats | Codes
    down: Floats | Codes


class Checkpoint:
    """`dense` and `expert` read; everything that could be missing or contradictory was found by the constructor."""

    def __init__(self, source: Source, model: Model) -> None:
        self.source, self.model = source, model
        self.stored: dict[str, Stored] = read_tensors(source)
        self.quant = dialects.quantization(source.config, source.json("hf_quant_config.json"))
        self.readings: dict[tuple[str, int | None, int | None], Reading] = {}
        self._resolve()
        self.files = {path: Mapped(path) for path in {s.file for s in self.stored.values()}}

    def _resolve(self) -> None:
        layout, missing = Layout(self.stored), []
        used: set[str] = set()
        rename = self._prefix(layout)
        for tensor in spec_tensors.of(self.model):
            renamed = Tensor(tensor.key, tensor.layer, tensor.expert, rename(tensor.name), tensor.shape, tensor.home)
            place = layout.place(renamed)
            if place is None:
                missing.append(tensor.name)
            elif not missing:
                used.update(p.stored.name for p in place.parts.values())
                self.readings[tensor.key, tensor.layer, tensor.expert] = dialects.read(place, tensor.shape, self.quant)
        if missing:
            some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise BadCheckpoint(f"{self.source.folder}: no tensor for {some}",
                                "incomplete download, or a config of another model? fetch the model again")

        self._explain(set(self.stored) - used, rename(self.model.names["attn_norm"]).split("{l}")[0])

    def _explain(self, left: set[str], root: str) -> None:
        """A tensor of a layer that we run, and that the spec has no place for, means that we would run the model wrongly."""
        layers, last = re.compile(re.escape(root) + r"(\d+)\."), len(self.model.layers)
        strange = sorted(n for n in left if (m := layers.match(n)) and int(m[1]) < last and not HARMLESS.search(n))
        if strange:
            more = f" and {len(strange) - 1} more" if strange[1:] else ""
            raise UnsupportedModel(f"{self.stored[strange[0]].file}: tensor {strange[0]!r}{more}: {self.model.family} has no place for it",
                                   "the config and the weights are of different kinds of model")

    def _prefix(self, layout: Layout) -> Any:
        """Multimodal and base-model checkpoints keep the same names under another root."""
        embed = next(t for t in spec_tensors.of(self.model) if t.key == "embed")
        if layout.place(embed) is None:
            for old, new in PREFIXES:
                there = Tensor("embed", None, None, re.sub("^" + re.escape(old), new, embed.name), embed.shape)
                if layout.place(there) is not None:
                    return lambda name: new + name[len(old):] if name.startswith(old) else name
        return lambda name: name

    # Reading

    def dense(self, tensor: Tensor) -> torch.Tensor:
        """A tensor of its spec's shape, copied: in the float type it is stored in, float32 when it was quantized."""
        reading = self.readings[tensor.key, tensor.layer, tensor.expert]
        parts = self._parts(reading)
        if reading.format in TORCH:
            data = parts["weight"]
            out = torch.empty(tensor.shape, dtype=TORCH[reading.format])
            if data.dtype == np.float64:
                data = data.astype(np.float32)
            bits = BITS_OF[reading.format]
            np.copyto(out.view(getattr(torch, np.dtype(bits).name)).numpy(), np.ascontiguousarray(data).view(bits).reshape(tensor.shape))
        else:
            out = torch.from_numpy(dialects.floats(reading, parts))
        self.release(reading)
        if self.model.norm_shift and tensor.key in spec_tensors.SHIFTED:
            out = out.float() + self.model.norm_shift                 # in float32: 16 bits would round what is near one
        if self.source.gguf and tensor.layer is not None and isinstance(part := self.model.layers[tensor.layer].attention, GatedDeltaNet) and \
                tensor.key.startswith("delta."):
            out = torch.from_numpy(ggml.plain_delta(tensor.key, part, ROWS[self.source.gguf].tiled, out.float().numpy()))
        if tensor.key == "head" and self.model.unit_head:
            out = out.float() / out.float().norm(dim=0, keepdim=True).clamp(min=1e-7)
        return out

    def expert_format(self, layer: int) -> str:
        """What the experts of this layer arrive in ("bf16", "int8_g32", "gptq_int4_g128", "q4_k", …); "a+b" when its matrices differ."""
        return "+".join(dict.fromkeys(r.format for r in self.expert_readings(layer, 0)))

    def expert_arrives(self, layer: int) -> str:
        """What packed formats are chosen by: the kernel format that keeps gate and up exactly, else what they come in, else (when those two differ)
        the bits of the wider; and after a "+" the same of down, where that is another; ORDERED when gate and up have an order of inputs."""
        *first, down = self.expert_readings(layer, 0)
        one, other = dict.fromkeys(r.keeps or r.format for r in first), down.keeps or down.format
        name = next(iter(one)) if len(one) == 1 else f"int{max(r.bits for r in first)}"
        return (name if name == other else f"{name}+{other}") + ORDERED * any(r.ordered for r in first)

    def expert_readings(self, layer: int, expert: int) -> list[Reading]:
        """Of gate (when gated), up and down, in this order."""
        keys = [(f"expert.{part}", layer, expert) for part in ("gate", "up", "down")]
        found = [self.readings[k] for k in keys if k in self.readings]
        if any(r.ordered for r in found) and ("expert.up.bias", layer, expert) in self.readings:        # biases lie in the order of the outputs
            found = [replace(r, exact=None, keeps="", ordered=False) if r.ordered else r for r in found]
        return found

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Views of the file where it holds floats, else exact codes, else float32. Call `release_expert` when they have been packed."""
        parts = [self.matrix(r) for r in self.expert_readings(layer, expert)]
        return ExpertWeights(parts[0] if len(parts) == 3 else None, parts[-2], parts[-1])

    def matrix(self, reading: Reading) -> Floats | Codes:
        parts = self._parts(reading)
        if reading.format in TORCH and parts["weight"].dtype != np.float64:
            return Floats(reading.format, parts["weight"].reshape(reading.shape))
        if reading.exact is not None:
            return reading.exact(parts)
        return Floats("f32", dialects.floats(reading, parts))

    def expert_biases(self, layer: int) -> dict[str, np.ndarray] | None:
        """{"gate": [E, I], "up": [E, I], "down": [E, H]} in float32; None when this layer's experts have none."""
        ffn = self.model.layers[layer].ffn
        if not isinstance(ffn, MoE) or not ffn.bias:
            return None
        found = {}
        for part in ("gate", "up", "down") if ffn.gated else ("up", "down"):
            rows = [self.readings[f"expert.{part}.bias", layer, e] for e in range(ffn.router.experts)]
            found[part] = np.stack([dialects.floats(r, self._parts(r)) for r in rows])
        return found

    def release_expert(self, layer: int, expert: int) -> None:
        for reading in self.expert_readings(layer, expert):
            self.release(reading)

    def release(self, reading: Reading) -> None:
        """Give the file's pages back to the system; small tensors share pages and are left."""
        for piece in reading.parts.values():
            start, nbytes = self._range(piece)
            if nbytes >= 4 * mmap.PAGESIZE:
                self.files[piece.stored.file].release(start, nbytes)

    # Pieces

    def _range(self, piece: Piece) -> tuple[int, int]:
        s = piece.stored
        if piece.expert is None:
            return s.start, s.nbytes
        each = s.nbytes // s.shape[0]
        return s.start + piece.expert * each, each

    def _parts(self, reading: Reading) -> Mapping[str, np.ndarray]:
        return {kind: self._piece(piece) for kind, piece in reading.parts.items()}

    def _piece(self, piece: Piece) -> np.ndarray:
        start, nbytes = self._range(piece)
        s = piece.stored
        raw = self.files[s.file].raw(start, nbytes)
        if s.dtype in dialects.ggml.BLOCKS:
            shape = s.shape[1:] if piece.expert is not None else s.shape
            array = raw.reshape(int(np.prod(shape[:-1])), -1)
        else:
            array = typed(raw, s if piece.expert is None else Stored(s.name, s.dtype, s.shape[1:], s.file, start, nbytes))
        if piece.turned:
            array = array.swapaxes(-1, -2)
        if piece.half is not None:
            which, interleaved = piece.half
            array = array[which::2] if interleaved else np.split(array, 2)[which]
        return array if piece.rows is None else array[piece.rows[0]:piece.rows[1]]

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.files = {}


