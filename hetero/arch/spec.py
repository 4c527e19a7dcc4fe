"""What a model is, as data: frozen records that a family's row builds and the decoder reads; knows no tensor library, no file and no family.

A kind is a type (GQA | MLA, Dense | MoE), never a boolean; a field is admitted when it is a number or a closed word that several families
set differently. Layout is a loading matter: names here are the checkpoint's logical tensors, however they are fused or quantized on disk.
"""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Scaling:
    """How rotary frequencies are stretched. kind: linear | dynamic | llama3 | yarn | longrope; `values` holds that kind's published numbers."""

    kind: str
    values: tuple[tuple[str, float | bool | tuple[float, ...]], ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary embedding over the first `dim` of each head's dimensions."""

    dim: int
    theta: float
    interleaved: bool = False
    scaling: Scaling | None = None
    context: int = 0                     # max_position_embeddings, which dynamic and longrope need


@dataclass(frozen=True)
class GQA:
    """Grouped-query attention. `rope` None: no position embedding in this layer."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    qk_norm: str = "none"                # none | head | full | rotated (per head, after rope)
    bias: bool = False                   # on q, k, v
    out_bias: bool = False
    window: int | None = None            # tokens seen, the current one included
    sinks: bool = False
    clip: float | None = None
    scale: float | None = None           # None: head_dim ** -0.5
    gate: bool = False                   # q's rows are, per head, query then gate; the output is multiplied by sigmoid(gate)


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The cache holds kv_rank + rope.dim numbers per token."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    v_dim: int
    rope: Rope
    scale: float | None = None           # None: (nope_dim + rope.dim) ** -0.5


def window(part: GQA | MLA) -> int | None:
    """Tokens that a layer sees, the current one included; None: everything."""
    return part.window if isinstance(part, GQA) else None


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta rule (arXiv 2412.06464). No KV: per sequence a state [value_heads, key_dim, value_dim] and the convolution's last inputs."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    grouped: bool = False                # q, k, v and z come as one matrix, per key head q | k | v | z, rather than apart
    paired: bool = False                 # b and a come as one matrix, per key head b | a

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q | k | v."""
        return 2 * self.keys + self.values


@dataclass(frozen=True)
class Foreign:
    """All of a layer but its routed experts, in code that is not ours: counted and placed, never computed here."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]     # (kind.name, shape)
    kv_numbers: int = 0                  # that its cache holds per token
    state_numbers: int = 0               # that its cache holds per sequence, however long


@dataclass(frozen=True)
class Router:
    """Scores to ids and weights. score: softmax | sigmoid | topk_softmax | sparsemixer | foreign (not ours to compute)."""

    experts: int
    top_k: int
    score: str
    renormalize: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"             # max | top2
    correction: bool = False             # a bias that picks, and does not weigh
    bias: bool = False
    jitter: float = 0.0                  # sparsemixer: scores further below the best than 2 * jitter of their size do not count


@dataclass(frozen=True)
class Act:
    """kind(gate * …) * (up + up_shift); silu(alpha * g) / alpha; `limit` clamps gate from above and up on both sides."""

    kind: str = "silu"                   # silu | gelu | gelu_tanh | relu2
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0


@dataclass(frozen=True)
class Dense:
    width: int
    act: Act = Act()
    bias: bool = False


@dataclass(frozen=True)
class MoE:
    router: Router
    width: int
    shared: int = 0                      # width of the always-on expert
    shared_gate: bool = False            # sigmoid gate on the shared expert
    act: Act = Act()
    gated: bool = True
    bias: bool = False                   # on each expert's gate, up and down
    weight_on: str = "output"            # output | input: where the router's weight multiplies
    hidden: int = 0                      # numbers per token that go in and come out; 0: the model's


@dataclass(frozen=True)
class Layer:
    attention: GQA | MLA | GatedDeltaNet | Foreign
    ffn: Dense | MoE
    norm_after: bool = False             # x + norm(f(x)) rather than x + f(norm(x))
    residual_scale: float = 1.0


@dataclass(frozen=True)
class Tensor:
    """One logical tensor. key: what it is ("attn.q", "expert.gate"); name: as the checkpoint calls it; home: dense | expert."""

    key: str
    layer: int | None
    expert: int | None
    name: str
    shape: tuple[int, ...]
    home: str = "dense"

    @property
    def parameters(self) -> int:
        n = 1
        for side in self.shape:
            n *= side
        return n


@dataclass(frozen=True)
class Model:
    """A whole model. `names` maps a tensor's key to its checkpoint name, with {l} and {e} for layer and expert."""

    family: str
    hidden: int
    vocab: int
    eps: float
    layers: tuple[Layer, ...]
    tied: bool
    names: dict[str, str] = field(hash=False)
    context: int = 0                     # max_position_embeddings
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    norm_bias: bool = False              # LayerNorm with bias rather than RMSNorm
    norm_shift: float = 0.0              # added to the weights of norms at load (Qwen3-Next stores them less one)
    head_bias: bool = False
    unit_head: bool = False              # the head's columns are divided by their length over the vocabulary, at load
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()     # of a foreign model: (kind.name, shape) in no layer, beside embed and head

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoE))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """What layers that keep KV see, each width once, None (everything) first, then the widest: layers of one width keep the same tokens."""
        seen = {window(layer.attention) for layer in self.layers if isinstance(layer.attention, GQA | MLA)}
        return tuple(sorted(seen, key=lambda w: -w if w else -float("inf"))) or (None,)

    @property
    def foreign(self) -> bool:
        """Whether the layers are code that is not ours."""
        return any(isinstance(layer.attention, Foreign) for layer in self.layers)

    def first(self, layers: int | None) -> "Model":
        """The same model cut to its first `layers` layers, for measuring; None leaves it whole."""
        return self if layers is None else replace(self, layers=self.layers[:layers])
