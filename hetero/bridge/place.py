"""A bridged model made real: its dense parameters loaded, its experts behind the interface, and what the engine drives; knows no request.

The self-test of a bridged model runs transformers' own code: a prompt whole, in pieces and token by token, so that caches that cannot take pieces
are found and not trusted; and it watches in which order each layer asks for routed and shared experts.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from cpu_kernels import ExpertLayer, cpu
from cpu_kernels.team import Team
from hetero.bridge.decoder import MARKS, Conversations, Decoder, Kept, shared_beside
from hetero.bridge.files import Files
from hetero.bridge.routed import Computed, attach, register
from hetero.bridge.skeleton import Skeleton
from hetero.engine.placed import KV_NAMES, PAGE, Placed, failed
from hetero.errors import BadCheckpoint, BadOption, UnsupportedModel
from hetero.gpu.host import Host
from hetero.gpu.ops import Check, Matrix, Row
from hetero.memory.plan import Plan
from hetero.model.check import check_experts
from hetero.options import Options
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.dummy import Dummy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LEAST = 1 << 12                          # numbers of a matrix worth packing
PROMPT = 24                              # tokens of the self-test: past one page, and a piece that is not a page's end


def adjusted(options: Options) -> Options:
    """The options as a bridged model means them. Raises BadOption for what is not for one."""
    for name, wrong, why in (("deterministic", options.deterministic, "transformers' own code promises no fixed order of sums"),
                             ("layers", options.layers is not None, "the skeleton is transformers', and is built whole"),
                             ("routing", options.routing != "model", "transformers' own router picks"),
                             ("overlap", not options.overlap, "routed experts are joined where transformers' block adds them"),
                             ("expert_cache", bool(options.expert_cache), "routed experts are computed by the CPU"),
                             ("kv_ram", bool(options.kv_ram), "the cache is transformers' own, and has no host tier")):
        if wrong:
            raise BadOption(f"{name} is not for a model that runs through the bridge: {why}", f"leave {name} out")
    gpu = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    dtype = options.dtype if options.dtype != "auto" else "bfloat16" if gpu else "float32"
    if options.kv_dtype not in ("auto", dtype):
        raise BadOption(f"kv_dtype = {options.kv_dtype} is not for a model that runs through the bridge: the cache is transformers' own, and "
                        f"keeps {dtype}",
                        "leave kv_dtype out, or set dtype")
    format = {"float32": "f32", "bfloat16": "bf16"}.get(dtype, "bf16")
    own = "auto" if not gpu and dtype == "float32" else format             # only on the CPU do our kernels stand behind matrices
    if own != "auto" and options.dense_format not in ("auto", own):
        raise BadOption(f"dense_format = {options.dense_format} is not for a model that runs through the bridge in {dtype} on "
                        f"{'a GPU' if gpu else 'the CPU'}", "leave dense_format out")
    return options.with_values("bridge", dtype=dtype, kv_dtype=dtype, expert_cache=0, **({} if own == "auto" else {"dense_format": own}))


class Packed(nn.Module):
    """A plain matrix by our kernels. `weight` is empty: it only says type and shape."""

    def __init__(self, matrix: Matrix, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.matrix, self.bias = matrix, bias
        self.weight = nn.Parameter(torch.empty(matrix.rows, matrix.cols, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.matrix(x.reshape(-1, x.shape[-1]).float().contiguous()).reshape(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class Packing:
    """Puts our kernels behind plain matrices as their weights come. A matrix whose weight is named elsewhere in the model's code stays as it is,
    and so does what is small, or picks experts."""

    def __init__(self, module: nn.Module, host: Host, format: str) -> None:
        self.module, self.host, self.format = module, host, format
        code = inspect.getsource(sys.modules[type(module).__module__])
        self.named = set(re.findall(r"(\w+)\.weight\b(?!\.(?:dtype|device|shape))", code)) | {"gate", "router"}
        self.made: list[Row] = []

    def takes(self, name: str) -> bool:
        path, _, last = name.rpartition(".")
        if self.format == "f32" or last != "weight" or path.rpartition(".")[2] in self.named:
            return False
        m = self.module.get_submodule(path)
        return type(m) is nn.Linear and m.in_features * m.out_features >= LEAST

    def put(self, name: str, weight: Tensor) -> None:
        path = name.removesuffix(".weight")
        owner, _, last = path.rpartition(".")
        old = self.module.get_submodule(path)
        assert isinstance(old, nn.Linear)
        made = Packed(self.host.matrix(weight, None, self.format), old.bias)
        self.module.get_submodule(owner)._modules[last] = made
        self.made.append(made.matrix.row())


def place(plan: Plan, skeleton: Skeleton, options: Options, weights: Checkpoint | Dummy, layers: dict[int, ExpertLayer], team: Team) -> Placed:
    """Raises UnsupportedModel when the model's code fails on a prompt, UnusableHardware when experts are computed wrongly."""
    register()
    device, dtype, isa = torch.device(plan.device), DTYPES[options.dtype], cpu.isa()
    module = skeleton.module
    packed = Packing(module, Host(plan.ctx, team, isa), plan.dense_format if plan.device == "cpu" and dtype == torch.float32 else "f32")
    fill(skeleton, weights, device, dtype, packed)
    beside = ThreadPoolExecutor(1, "experts") if device.type == "cuda" else None
    computed = {}
    for l, routed in skeleton.routed.items():
        norm = routed.module.get_submodule("post_expert_norm").to("cpu", torch.float32) if routed.post_norm else None
        computed[l] = Computed(layers[l], l, team, options.precision, isa, norm, beside)
        attach(routed.module, computed[l])
    decoder = Decoder(module, skeleton.model, computed, device, dtype, packed.made)
    checks = tuple(check_experts(layers, team))
    failed(checks, False)
    checks += tuple(try_out(decoder, skeleton, plan))
    cache = Conversations(skeleton.model, plan.kv_tokens // PAGE, PAGE, KV_NAMES[plan.kv_dtype], plan.device, plan.max_batch, MARKS)

    def fresh(pages: int) -> Conversations:
        return Conversations(skeleton.model, pages, PAGE, KV_NAMES[plan.kv_dtype], plan.device)
    facts = {"bridge": f"{skeleton.name} is transformers' own code with our experts; sequences take turns",
             "prompts": "in chunks" if decoder.whole else "in one piece where they fit: this cache cannot go on with more than one token at a time",
             "overlap": overlap(computed), **({"bridge notes": "; ".join(skeleton.notes)} if skeleton.notes else {})}
    return Placed(decoder, decoder, cache, facts, checks, lambda other, pages: decoder, fresh)


def fill(skeleton: Skeleton, weights: Checkpoint | Dummy, device: torch.device, dtype: torch.dtype, packed: Packing) -> None:
    """Every dense parameter, one at a time, in the type its module wants; buffers to the device; what stays empty stays on no memory."""
    module = skeleton.module
    state = module.state_dict(keep_vars=True)
    sources = set(skeleton.tied.values())
    for name, given in weights.parameters() if isinstance(weights, Files) else drawn(skeleton):
        empty = state[name]
        if given.shape != empty.shape:
            if given.numel() != empty.numel():
                raise BadCheckpoint(f"{name} is stored as {list(given.shape)}, {skeleton.name} wants {list(empty.shape)}",
                                    "the config and the weights are of different models")
            given = given.reshape(empty.shape)
        if name not in sources and packed.takes(name):
            packed.put(name, given)
            continue
        strict = torch.float32 if empty.is_floating_point() and keeps_float32(module, name) else empty.dtype
        put(module, name, given.to(device, strict, copy=not isinstance(weights, Files)))
    for path, buffer in list(module.named_buffers()):
        if buffer.device.type != "meta" and buffer.device != device:
            put(module, path, buffer.to(device))
    for name, source in skeleton.tied.items():
        if packed.takes(name):
            packed.put(name, module.get_parameter(source))
        elif source in state:
            put(module, name, module.get_parameter(source))


def keeps_float32(module: nn.Module, name: str) -> bool:
    words = vars(module).get("_keep_in_fp32_modules_strict") or ()
    return any(w in name.split(".") or w in name for w in words)


def put(module: nn.Module, name: str, value: Tensor) -> None:
    """Sets a parameter or buffer by its full name."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    if last in owner._buffers:
        owner._buffers[last] = value
    else:
        owner._parameters[last] = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)


def drawn(skeleton: Skeleton) -> Iterator[tuple[str, Tensor]]:
    """Random dense parameters of a sane size, for measuring without a checkpoint."""
    state, generator = skeleton.module.state_dict(keep_vars=True), torch.Generator().manual_seed(0)
    for name in skeleton.dense:
        shape = state[name].shape
        if not state[name].is_floating_point():
            yield name, torch.zeros(shape, dtype=state[name].dtype)
        else:
            yield name, torch.ones(shape) if len(shape) < 2 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def try_out(decoder: Decoder, skeleton: Skeleton, plan: Plan) -> Iterator[Check]:
    """A prompt in one go against the same in pieces and token by token; sets `decoder.whole`, and notes on what overlaps. The best quarter of tokens
    counts: where a model picks what it attends to, or experts, a tie may fall either way, and a cache that fails is wrong for every token."""
    count = min(PROMPT, plan.ctx)
    tokens = (torch.arange(count) * 7919 + 11) % min(skeleton.model.vocab, 1000)
    kept = Kept()
    orders = Watch(skeleton, decoder.computed)
    try:
        want = decoder.run(tokens, 0, kept, list(range(count)))
    except (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError) as e:
        raise UnsupportedModel(f"{skeleton.name}: transformers' code fails on a prompt: {type(e).__name__}: {' '.join(str(e).split())[:200]}",
                               "the bridge gives it token ids and its own cache, nothing else") from e
    finally:
        orders.close()
    size = float(want.abs().max()) or 1.0

    def difference(pieces: list[int]) -> float:
        kept, at, rows = Kept(), 0, []
        for n in pieces:
            rows.append(decoder.run(tokens[at:at + n], at, kept, list(range(n))))
            at += n
        found = float((torch.cat(rows) - want)[count // 2:].abs().amax(-1).quantile(0.25)) / size
        return found if found == found else float("inf")
    bound = 2e-2 if decoder.dtype == torch.float32 else 0.1
    stepped = difference([count // 2, *[1] * (count - count // 2)])
    yield Check("bridge", f"{skeleton.name}, token by token", str(decoder.dtype).removeprefix("torch."), stepped, bound)
    if not stepped <= bound:
        raise UnsupportedModel(f"{skeleton.name}: token by token differs from one prompt by {stepped:.1e} of the largest logit, at most {bound:.0e} "
                               "is right",
                               "transformers' cache of this model does not do what it should: a newer transformers may")
    pieces = [count // 2, count - count // 2 - 3, 3]
    try:
        cut = difference([p for p in pieces if p > 0])
    except (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        cut = float("inf")
    decoder.whole = cut <= bound
    if decoder.whole:
        yield Check("bridge", f"{skeleton.name}, in pieces", str(decoder.dtype).removeprefix("torch."), cut, bound)


class Watch:
    """In which order one forward asks for routed experts, shared experts and the join; ends with `close`, which writes each layer's note."""

    def __init__(self, skeleton: Skeleton, computed: dict[int, Computed]) -> None:
        self.computed, self.events = computed, {l: [] for l in computed}            # type: dict[int, Computed], dict[int, list[str]]
        self.hooks = []
        self.shared = dict.fromkeys(computed, False)
        for l, routed in skeleton.routed.items():
            computed[l].seen = lambda what, number: self.events[number].append(what)
            for _, m in shared_beside(skeleton.module, routed.name):
                self.shared[l] = True
                self.hooks.append(m.register_forward_pre_hook(lambda m, args, l=l: self.events[l].append("shared")))

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for l, c in self.computed.items():
            c.seen = None
            inside = self.events[l][self.events[l].index("start") + 1:self.events[l].index("join")] if "join" in self.events[l] else []
            c.note = "no shared expert" if not self.shared[l] else "beside the shared expert, joined at the add" if "shared" in inside else \
                "not beside the shared expert: the block asks for that first" if "shared" in self.events[l] else "no shared expert reached"


def overlap(computed: dict[int, Computed]) -> str:
    """One line for the report."""
    notes = [c.note for c in computed.values()]
    can = sum(n.startswith("beside") for n in notes)
    one = next(iter(computed.values()))
    if one.beside is None:
        said = f"{can} of {len(notes)} layers could" if can else "no layer could"
        for c in computed.values():
            c.note = ""
        return f"routed and shared experts share one CPU, one after the other ({said} run both at once with a GPU)"
    return f"routed experts start before the shared expert and are joined at the add in {can} of {len(notes)} layers" if can else \
        f"none: {notes[0]}"
