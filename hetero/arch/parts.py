"""The parts that family rows are made of, read from a config's fields; knows no family by name."""

from collections.abc import Callable, Iterable
from typing import Any

from hetero.arch import rope
from hetero.arch.fields import Fields
from hetero.arch.spec import GQA, MLA, Act, Dense, GatedDeltaNet, Layer, Model, MoE, Router

PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token")
ACTIVATIONS = {"silu": Act("silu"), "swish": Act("silu"), "gelu": Act("gelu"), "gelu_pytorch_tanh": Act("gelu_tanh"), "gelu_new": Act("gelu_tanh"),
               "relu2": Act("relu2")}


def gqa(f: Fields, interleaved: bool = False, theta: float = 10000.0, partial: float = 1.0, kind: str | None = None, **more: Any) -> GQA:
    """Grouped-query attention; `more` are GQA's own fields."""
    heads = f.count("num_attention_heads")
    dim = f.count("head_dim", default=None)
    if dim is None:
        dim = f.count("hidden_size") // heads
    kv_heads = f.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise f.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    return GQA(heads, kv_heads, dim, rope.read(f, dim, interleaved, theta, partial, kind), **more)


def mla(f: Fields) -> MLA:
    """Latent attention as DeepSeek-V2 and V3 write it; the softmax grows with yarn's mscale_all_dim."""
    f.skip("head_dim", "qk_head_dim", "num_key_value_heads")
    f.expect(attention_bias=False)
    nope, turned = f.count("qk_nope_head_dim"), f.count("qk_rope_head_dim")
    turning = rope.read(f, turned, f.flag("rope_interleave", default=True))
    if turning is None or turning.dim != turned:
        raise f.refuse("partial_rotary_factor", f("partial_rotary_factor", default=None), "1.0 with latent attention")
    return MLA(f.count("num_attention_heads"), f.count("q_lora_rank", default=None), f.count("kv_lora_rank"), nope, f.count("v_head_dim"), turning,
               (nope + turned) ** -0.5 * rope.softmax_growth(turning))


def delta_net(f: Fields, grouped: bool) -> GatedDeltaNet:
    """Qwen3-Next's and Qwen3.5's linear attention."""
    f.expect(mamba_ssm_dtype="float32", output_gate_type=("swish", "silu"))
    key_heads, value_heads = f.count("linear_num_key_heads"), f.count("linear_num_value_heads")
    if value_heads % key_heads:
        raise f.refuse("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads ({key_heads})")
    return GatedDeltaNet(key_heads, value_heads, f.count("linear_key_head_dim"), f.count("linear_value_head_dim"),
                         f.count("linear_conv_kernel_dim", least=2), grouped, grouped)


def layer_kinds(f: Fields, known: dict[str, Any], interval: int) -> list[Any]:
    """What each layer is: a word per layer, or every `full_attention_interval`-th (default `interval`) full and the others linear."""
    n, step = f.count("num_hidden_layers", most=4096), f.count("full_attention_interval", default=interval)
    return f.words("layer_types", n, known, default=["linear_attention" if (i + 1) % step else "full_attention" for i in range(n)])


def act(f: Fields) -> Act:
    name = f("hidden_act", "hidden_activation", default="silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise f.refuse(f.found(("hidden_act", "hidden_activation")), name, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def router(f: Fields, experts: tuple[str, ...], top_k: tuple[str, ...], score: str, renormalize: bool, **more: Any) -> Router:
    """A router whose counts stand under these keys; `more` are Router's own fields."""
    n = f.count(*experts)
    k = f.count(*top_k, most=n)
    r = Router(n, k, score, renormalize, **more)
    if r.experts % r.groups or not r.top_groups <= r.groups or r.top_k > r.top_groups * (r.experts // r.groups):
        raise f.refuse("n_group", r.groups, f"groups that divide {r.experts} experts and leave {r.top_k} in {r.top_groups} groups")
    return r


def sigmoid_moe(f: Fields, experts: tuple[str, ...] = ("n_routed_experts",), shared: tuple[str, ...] = ("n_shared_experts",),
                shared_width: int | None = None) -> MoE:
    """DeepSeek-V3's layer (arXiv 2412.19437), which GLM-4-MoE, GLM-4.7-Flash, Kimi-K2, dots.llm1 and Ling 2.0 share. `experts`, `shared`: the keys of
    their counts; `shared_width`: of one shared expert, where it is not a routed one's."""
    f.expect(topk_method="noaux_tc", scoring_func=("sigmoid", "noaux_tc"), moe_layer_freq=1)
    r = router(f, experts, PER_TOKEN, "sigmoid", f.flag("norm_topk_prob", default=True),
               scale=f.number("routed_scaling_factor", default=1.0), groups=f.count("n_group", default=1),
               top_groups=f.count("topk_group", default=1), group_score="top2", correction=True)
    width = f.count("moe_intermediate_size")
    return MoE(r, width, shared=(shared_width or width) * f.count(*shared, default=0, least=0), act=act(f))


def stack(f: Fields, attention: GQA | MLA, moe: MoE, dense: Callable[[int], bool] = lambda i: False) -> list[Layer]:
    """Every layer alike, but for the dense ones."""
    layers = f.count("num_hidden_layers", most=4096)
    flags = [bool(dense(i)) for i in range(layers)]
    plain = Dense(f.count("intermediate_size"), moe.act) if any(flags) else None
    f.skip("intermediate_size")
    return [Layer(attention, plain if flag and plain else moe) for flag in flags]


def leading_dense(f: Fields, least: int = 0) -> Callable[[int], bool]:
    """DeepSeek's way: the first layers are dense (`least` where the key is absent). Or GLM's: a word per layer."""
    f.skip("first_k_dense_replace")
    if f("mlp_layer_types", default=None) is not None:
        kinds = f.words("mlp_layer_types", f.count("num_hidden_layers"), {"dense": True, "sparse": False})
        return lambda i: kinds[i]
    first = f.count("first_k_dense_replace", default=least, least=0)
    return lambda i: i < first


def sparse_step(f: Fields) -> Callable[[int], bool]:
    """Qwen's way: every n-th layer has experts, and some are named dense."""
    step, dense = f.count("decoder_sparse_step", default=1), f.indices("mlp_only_layers")
    return lambda i: i in dense or (i + 1) % step != 0


def model(f: Fields, family: str, layers: Iterable[Layer], names: dict[str, str], tied: bool = False, eps: float = 1e-6, **more: Any) -> Model:
    """The whole; `tied` and `eps` are the family's defaults, `more` Model's own fields."""
    act(f)
    f.expect(mlp_bias=False)
    return Model(family, f.count("hidden_size"), f.count("vocab_size"), f.number("rms_norm_eps", default=eps), tuple(layers),
                 f.flag("tie_word_embeddings", default=tied), names, context=f.count("max_position_embeddings", default=0, least=0), **more)
