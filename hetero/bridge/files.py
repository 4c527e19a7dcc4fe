"""A checkpoint read for transformers' own modules: its names through transformers' conversions, its bytes through our readers.

Every stored tensor is renamed, and grouped, as transformers' loader would; what converts it is run on one dense tensor, or on one expert, at a time.
Knows no kernel and no family.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    ErnieFuseAndSplitTextVisionExperts,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from hetero.bridge.skeleton import LAYER, Routed, Skeleton
from hetero.errors import BadCheckpoint, UnsupportedModel
from hetero.weights import dialects
from hetero.weights.checkpoint import HARMLESS, Checkpoint
from hetero.weights.layout import BESIDE, Piece, Place
from hetero.weights.reading import Parts, Reading
from hetero.weights.source import Source
from hetero.weights.stored import Stored

WHOLE = ("I64", "I32", "I16", "U8", "BOOL")             # tables of whole numbers, as hash routing keeps them
MAIN = ("weight", "weight_packed", "qweight", "blocks")
FUSED = re.compile(r"^(.*(?:gate_up_proj|down_proj|up_proj))_(blocks|scales|scale_inv|scale)$")


@dataclass
class Target:
    """One parameter of a module, or the first of several made together: from which stored matrices, by which conversion."""

    name: str
    converter: WeightConverter | None
    sources: dict[str, list[str]]        # pattern -> logical names, in the order that conversions expect

    @property
    def names(self) -> list[str]:
        """All parameters that the conversion makes."""
        if self.converter is None:
            return [self.name]
        first = self.converter.target_patterns[0]
        return [self.name.replace(first, other) for other in self.converter.target_patterns]

    @property
    def operations(self) -> list[ConversionOps]:
        return [] if self.converter is None else list(self.converter.operations)

    def convert(self, given: dict[str, Any], module: nn.Module) -> dict[str, Tensor]:
        """What transformers makes of these tensors (a list per pattern), by full name."""
        assert self.converter is not None
        for op in self.operations:
            given = op.convert(given, source_patterns=self.converter.source_patterns, target_patterns=self.converter.target_patterns,
                               full_layer_name=self.name, model=module, config=module.config, missing_keys=set())
        full = self.name.replace("*.", "0.")
        key = next((k for k in given if k in full), None)
        before, _, after = full.partition(key) if key is not None else ("", "", "")
        return {before + k + after if key is not None else k: v[0] if isinstance(v, list) else v for k, v in given.items()}


class Files(Checkpoint):
    """A Checkpoint of a skeleton. `readings` holds the routed experts, one matrix of one expert each; `targets` the dense parameters."""

    def __init__(self, source: Source, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self.logical: dict[str, Place] = {}
        self.targets: dict[str, Target] = {}
        super().__init__(source, skeleton.model)

    def _resolve(self) -> None:
        self.logical = dict(logical(self.stored))
        found = self._targets()
        made = {name: t for t in found.values() for name in t.names}
        wanted = [*self.skeleton.dense, *(f"{r.name}.{p}" for r in self.skeleton.routed.values() for p in parameters(r))]
        if missing := [n for n in wanted if n not in made]:
            some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise BadCheckpoint(f"{self.source.folder}: no tensor for {some}",
                                "incomplete download, or a config of another model? fetch the model again")
        self.targets = {t.name: t for t in found.values() if set(t.names) & set(self.skeleton.dense)}
        for routed in self.skeleton.routed.values():
            self._experts(routed, made)

    def _targets(self) -> dict[str, Target]:
        """Every stored matrix under the parameter it goes to. Raises UnsupportedModel for one in a layer that has no such parameter."""
        module = self.skeleton.module
        mapping = get_model_conversion_mapping(module)
        renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        by_pattern = {k: c for c in converters for k in c.source_patterns}
        state, prefix = module.state_dict(), module.base_model_prefix
        found: dict[str, Target] = {}
        strange: list[str] = []
        for name in sorted(self.logical, key=dot_natural_key):
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if renamed not in state and name in state:
                renamed, pattern = name, None
            if renamed not in state:
                strange.append(name) if self._strange(name, renamed) else None
                continue
            target = found.setdefault(renamed, Target(renamed, by_pattern[pattern] if pattern is not None else None, {}))
            target.sources.setdefault(pattern if pattern is not None else name, []).append(name)
        if strange:
            more = f" and {len(strange) - 1} more" if strange[1:] else ""
            raise UnsupportedModel(f"{self.source.folder}: tensor {strange[0]!r}{more}: {self.skeleton.name} has no place for it",
                                   "the config and the weights are of different kinds of model, or a newer transformers is needed")
        return found

    def _strange(self, name: str, renamed: str) -> bool:
        """A tensor of a layer that runs and that nobody asked for would be left out of the arithmetic."""
        ignored = self.skeleton.module._keys_to_ignore_on_load_unexpected or ()
        if HARMLESS.search(name) or any(re.search(p, n) for p in ignored for n in (name, renamed)):
            return False
        first = next(iter(self.skeleton.routed.values())).name
        m = LAYER.search(renamed)
        root = first[:LAYER.search(first + ".").start(1)]                  # type: ignore[union-attr]
        return m is not None and renamed[:m.start(1)] == root and int(m[1]) < len(self.model.layers)

    # Routed experts

    def _experts(self, routed: Routed, made: Mapping[str, Target]) -> None:
        moe, l = routed.moe, routed.layer
        for param, parts in ((routed.first, ("gate", "up") if moe.gated else ("up",)), ("down_proj", ("down",))):
            target = made[f"{routed.name}.{param}"]
            for e in range(moe.router.experts):
                for i, part in enumerate(parts):
                    shape = (moe.hidden, moe.width) if part == "down" else (moe.width, moe.hidden)
                    self.readings[f"expert.{part}", l, e] = self._expert(routed, target, e, i if len(parts) > 1 else None, shape)

    def _expert(self, routed: Routed, target: Target, e: int, half: int | None, shape: tuple[int, ...]) -> Reading:
        """One matrix of one expert, as kernels want it: gate and up [I, H], down [H, I]. `half`: which of gate and up."""
        kinds = [type(op) for op in target.operations]
        E, lists = routed.moe.router.experts, list(target.sources.values())
        if target.converter is None:
            place = self.logical[lists[0][0]]
            piece = {k: Piece(p.stored, e, None if half is None else (half, not routed.concatenated), turned=routed.transposed)
                     for k, p in place.parts.items()}
            self._check(place, E, e)
            return dialects.read(Place(place.stem, piece), shape, self.quant)
        straight = kinds in ([MergeModulelist], [MergeModulelist, Concatenate], [ErnieFuseAndSplitTextVisionExperts])
        many = 2 * E if kinds == [ErnieFuseAndSplitTextVisionExperts] else E
        if straight and routed.concatenated and not routed.transposed and len(lists) == (1 if half is None else 2):
            names = self._pattern(target, half or 0)
            if len(names) != many:
                raise BadCheckpoint(f"{self.source.folder}: {len(names)} experts for {target.name}, the config says {many}",
                                    "incomplete download, or a config of another model? fetch the model again")
            return dialects.read(self.logical[names[e]], shape, self.quant)
        return self._composed(routed, target, e, half, shape)

    def _pattern(self, target: Target, i: int) -> list[str]:
        """The names under the i-th pattern of the conversion, in the order of its own list."""
        assert target.converter is not None
        present = [p for p in target.converter.source_patterns if p in target.sources]
        return target.sources[present[i]]

    def _composed(self, routed: Routed, target: Target, e: int, half: int | None, shape: tuple[int, ...]) -> Reading:
        """Through transformers' own conversion, on this expert's tensors alone: as float32."""
        E, module = routed.moe.router.experts, self.skeleton.module
        inner: dict[str, list[tuple[str, Reading]]] = {}
        parts: dict[str, Piece] = {}
        for pattern, names in target.sources.items():
            for n in [names[e]] if len(names) == E else names:
                place = self.logical[n]
                stacked = len(names) != E
                if stacked:
                    self._check(place, E, e)
                    place = Place(place.stem, {k: replace(p, expert=e) for k, p in place.parts.items()})
                reading = dialects.read(place, next(p for k, p in place.parts.items() if k in MAIN).shape, self.quant)
                inner.setdefault(pattern, []).append((n, reading))
                parts |= {f"{n}|{k}": p for k, p in reading.parts.items()}
        lists = {p: len(target.sources[p]) == E for p in inner}

        def make(given: Parts) -> np.ndarray:
            tensors: dict[str, list[Tensor]] = {}
            for pattern, readings in inner.items():
                for n, reading in readings:
                    own = {k: given[f"{n}|{k}"] for k in reading.parts}
                    t = torch.from_numpy(dialects.floats(reading, own).copy())
                    tensors.setdefault(pattern, []).append(t if lists[pattern] else t[None])
            out = target.convert(dict(tensors), module)[f"{routed.name}.{routed.first if half is not None else target.name.rsplit('.', 1)[1]}"]
            if out.shape[0] == 1 and out.dim() == 3:
                out = out[0]
            if routed.transposed:
                out = out.T
            if half is not None:
                out = out.chunk(2)[half] if routed.concatenated else out[half::2]
            if tuple(out.shape) != shape:
                raise ValueError(f"{target.name}: a converted expert has the shape {list(out.shape)}, the config says {list(shape)}")
            return out.contiguous().numpy()
        formats = sorted({r.format for rs in inner.values() for _, r in rs})
        return Reading("+".join(formats) + " (converted)", max(r.bits for rs in inner.values() for _, r in rs), shape, parts, make)

    def _check(self, place: Place, experts: int, e: int) -> None:
        for piece in place.parts.values():
            if e == 0 and (not piece.stored.shape or piece.stored.shape[0] != experts):
                raise BadCheckpoint(f"{piece.stored.file}: tensor {piece.stored.name!r} has the shape {list(piece.stored.shape)}, "
                                    f"the config says {experts} experts", "the config and the weights are of different models")

    def expert_biases(self, layer: int) -> dict[str, np.ndarray] | None:
        """{"gate": [E, I], "up": [E, I], "down": [E, H]} in float32; None when this layer's experts have none."""
        routed = self.skeleton.routed[layer]
        if not routed.moe.bias:
            return None
        first, down = (self.parameter(f"{routed.name}.{p}_bias").numpy() for p in (routed.first, "down_proj"))
        if not routed.moe.gated:
            return {"up": first, "down": down}
        gate, up = np.split(first, 2, axis=1) if routed.concatenated else (first[:, ::2], first[:, 1::2])
        return {"gate": np.ascontiguousarray(gate), "up": np.ascontiguousarray(up), "down": down}

    # Dense parameters

    def parameter(self, name: str) -> Tensor:
        """One parameter in float32, not converted."""
        found, _ = self._read(next(n for n in self.logical if n == name or n.endswith(name.split(".", 1)[-1])))
        return found.float()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every dense parameter, once, in the float type it is stored in (float32 when it was quantized)."""
        wanted = set(self.skeleton.dense)
        for target in self.targets.values():
            read = {p: [self._read(n) for n in names] for p, names in target.sources.items()}
            given = {p: [t for t, _ in found] for p, found in read.items()}
            made = {target.name: next(iter(given.values()))[0]} if target.converter is None else target.convert(dict(given), self.skeleton.module)
            yield from ((n, t) for n, t in made.items() if n in wanted)
            for found in read.values():
                for _, reading in found:
                    self.release(reading)

    def _read(self, name: str) -> tuple[Tensor, Reading]:
        place = self.logical[name]
        shape = self._shape(place)
        if set(place.parts) == {"weight"} and place.parts["weight"].stored.dtype in WHOLE:
            table = torch.from_numpy(self._piece(place.parts["weight"]).copy())
            return table, Reading("int", 64, shape, {"weight": place.parts["weight"]}, lambda parts: table.numpy())
        reading = dialects.read(place, shape, self.quant)
        parts = self._parts(reading)
        kind = reading.format
        if kind in ("bf16", "f16", "f32") and parts["weight"].dtype != np.float64:
            raw = np.ascontiguousarray(parts["weight"])
            dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[kind]
            return torch.from_numpy(raw.view(np.uint16 if kind != "f32" else np.uint32).copy()).view(dtype).reshape(shape), reading
        return torch.from_numpy(dialects.floats(reading, parts)), reading

    def _shape(self, place: Place) -> tuple[int, ...]:
        """The logical shape of what is stored: packed kinds say theirs, or it follows from their bits."""
        main = next(k for k in place.parts if k in MAIN)
        shape = place.parts[main].shape
        if main == "weight" and place.parts[main].stored.dtype not in ("U8", "I32"):
            return shape
        state = self.skeleton.module.state_dict()
        name = next((n for n in state if n.endswith(place.stem + ".weight")), None)
        return tuple(state[name].shape) if name else (shape[0], prod(shape[1:]) * (2 if main == "weight" else 8))


def parameters(routed: Routed) -> list[str]:
    return [n for n, _ in routed.module.named_parameters(recurse=False)]


def logical(stored: Mapping[str, Stored]) -> Iterator[tuple[str, Place]]:
    """Matrices by the name they would have unquantized, each with all that is stored for it."""
    groups: dict[str, dict[str, Stored]] = {}
    for name, s in stored.items():
        if m := FUSED.match(name):
            groups.setdefault(m[1], {})[m[2]] = s
            continue
        stem, _, kind = name.rpartition(".")
        if kind in BESIDE and kind not in ("bias", *MAIN) and not any(f"{stem}.{k}" in stored for k in MAIN):
            stem, kind = name, "weight"                                  # a parameter that happens to be called scale
        if kind == "bias" or kind not in BESIDE:
            groups.setdefault(name, {})["weight"] = s
        elif stem == name:
            groups.setdefault(name, {})[kind] = s
        else:
            groups.setdefault(f"{stem}.weight", {})[kind] = s
    for name, kinds in groups.items():
        yield name, Place(name.removesuffix(".weight"), {k: Piece(s) for k, s in kinds.items()})
