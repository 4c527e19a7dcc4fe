"""Where in a checkpoint one logical tensor lies: alone, stacked with other experts, or fused with its neighbour; knows names and shapes, no numbers.

Spellings of routed experts: one tensor each; [E, 2I, H] halves (transformers 5, Granite); [E, H, 2I] transposed (Qwen3-VL, Llama 4);
[E, H, 2I] transposed, interleaved, with biases (gpt-oss), and its MXFP4 blocks [E, 2I, H/32, 16]; [E, N, K] stacks (GGUF), or
[E, 2I, H] halves. Dense gate and up may be halves of one matrix too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero.arch.spec import Tensor
from hetero.errors import BadCheckpoint
from hetero.weights.stored import Stored

EXPERT = re.compile(r"^(.*?)(\.experts)?\.(\d+)\.([^.]+(?:\.linear)?)(\.weight|\.bias)?$")
ROWS = re.compile(r"^(.*)\[(\d+):(\d+)\]$")
BESIDE = ("weight", "bias", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed", "weight_global_scale", "weight_zero_point",
          "weight_g_idx", "weight_shape", "qweight", "qzeros", "scales", "g_idx", "blocks", "scale", "scale_inv")


@dataclass(frozen=True)
class Piece:
    """Part of a stored tensor. `expert`: index on the first axis; `half`: (which, interleaved) of the row axis; `rows`: a range of it;
    `turned`: rows and columns change places after."""

    stored: Stored
    expert: int | None = None
    half: tuple[int, bool] | None = None
    rows: tuple[int, int] | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.stored.shape if self.expert is None else self.stored.shape[1:])
        if self.turned:
            shape[-2:] = shape[-2:][::-1]
        if self.half is not None and shape:
            shape[0] //= 2
        if self.rows is not None and shape:
            shape[0] = self.rows[1] - self.rows[0]
        return tuple(shape)


@dataclass(frozen=True)
class Place:
    """All that is stored for one logical matrix, by the kind it has beside "weight" ("weight_scale", "qzeros", …)."""

    stem: str                            # the module's name, for rules that exclude modules and for messages
    parts: Mapping[str, Piece]


class Layout:
    """Finds places among the stored tensors of one checkpoint."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored
        self.beside: dict[str, dict[str, Stored]] = {}
        for name, s in stored.items():
            stem, _, kind = name.rpartition(".")
            if kind in BESIDE:
                self.beside.setdefault(stem, {})[kind] = s

    def place(self, tensor: Tensor) -> Place | None:
        """None when nothing is stored for it."""
        name, rows = tensor.name, None
        if m := ROWS.match(name):
            name, rows = m[1], (int(m[2]), int(m[3]))
        bias = name.endswith(".bias") or tensor.key.endswith(".bias")
        if tensor.expert is not None and (found := self.fused(tensor, name, bias)) is not None:
            return found
        if name in self.stored and not name.endswith(".weight"):
            return Place(name, {"weight": self.piece(self.stored[name], tensor, rows)})
        stem = name.removesuffix(".bias" if bias else ".weight")
        beside, half = self.beside.get(stem, {}), None
        if not beside and tensor.key in ("mlp.gate", "mlp.up", "shared.gate", "shared.up"):
            parent, half = stem.rpartition(".")[0], (int(tensor.key.endswith("up")), False)
            stem = next((s for s in (f"{parent}.input_linear", f"{parent}.gate_up_proj") if s in self.beside), stem)
            beside = self.beside.get(stem, {})
        if not beside and tensor.key.startswith(("expert.gate", "expert.up")):
            stem, half = re.sub(r"ffn_(gate|up)_exps$", "ffn_gate_up_exps", stem), (int(tensor.key.startswith("expert.up")), False)
            beside = self.beside.get(stem, {})
        if not beside and tensor.key == "attn.kv_b" and not bias:
            halves = [self.stored.get(name.replace("kv_b", k)) for k in ("k_b", "v_b")]
            return Place(stem, {k: Piece(s) for k, s in zip(("k_b", "v_b"), halves, strict=True) if s is not None}) if all(halves) else None
        parts = {"weight" if bias else k: replace(self.piece(s, tensor, rows), half=half) for k, s in beside.items() if (k == "bias") == bias}
        return Place(stem, parts) if parts else None

    def piece(self, stored: Stored, tensor: Tensor, rows: tuple[int, int] | None) -> Piece:
        stacked = tensor.expert is not None and len(stored.shape) == len(tensor.shape) + 1
        if stacked and not tensor.expert < stored.shape[0]:                               # type: ignore[operator]
            raise BadCheckpoint(f"{stored.file}: tensor {stored.name!r} has {stored.shape[0]} experts, but the config needs expert {tensor.expert}")
        return Piece(stored, tensor.expert if stacked else None, rows=rows)

    def fused(self, tensor: Tensor, name: str, bias: bool) -> Place | None:
        """gate and up in one tensor of all experts, or down as a stack of all experts; None when the checkpoint has no such tensor."""
        m = EXPERT.match(name)
        if m is None or name in self.stored:
            return None
        part = tensor.key.split(".")[1]
        both = part != "down"
        roots = [f"{m[1]}{m[2] or ''}.{'gate_up_proj' if both else 'down_proj'}", f"{m[1]}.{'input_linear' if both else 'output_linear'}"]
        for root in roots:
            found = {k: s for k in ("", *BESIDE) for joint in "._" if (s := self.stored.get(f"{root}{joint}{k}" if k else root)) is not None}
            wanted = {"bias"} if bias else set(found) - {"bias"}
            if parts := {k or "weight": s for k, s in found.items() if k in wanted}:
                turned = self.turned(tensor, m[1] + (m[2] or ""), both)
                interleaved = "bias" in found or "blocks" in found
                half = (int(part == "up"), interleaved) if both else None
                for k, s in parts.items():
                    if not s.shape or tensor.expert >= s.shape[0]:                        # type: ignore[operator]
                        raise BadCheckpoint(f"{s.file}: tensor {s.name!r} of shape {list(s.shape)} has no expert {tensor.expert}",
                                            "the config and the weights are of different models")
                    if both and len(s.shape) > 1 and s.shape[-1 if turned and k == "weight" else 1] % 2:
                        raise BadCheckpoint(f"{s.file}: tensor {s.name!r} of shape {list(s.shape)} cannot hold gate and up")
                return Place(root, {"weight" if bias else k: Piece(s, tensor.expert, half if len(s.shape) > 1 else None,
                                                                   turned=turned and k == "weight" and not bias) for k, s in parts.items()})
        return None

    def turned(self, tensor: Tensor, experts: str, both: bool) -> bool:
        """Whether fused float weights are [E, in, out]: told by the first of gate_up and down whose sides differ."""
        if len(tensor.shape) == 2:
            I, H = tensor.shape if both else tensor.shape[::-1]
            for name, out, into in ((f"{experts}.gate_up_proj", 2 * I, H), (f"{experts}.down_proj", H, I)):
                if (s := self.stored.get(name)) is not None and len(s.shape) == 3 and out != into:
                    return s.shape[1:] == (into, out)
        return False
