"""From a model's name to text: source, spec, machine, plan, decoder, engine, tokenizer. The only file that sees all of them."""

import gc
import json
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cpu_kernels import cpu
from cpu_kernels.team import Team
from hetero import options as settings
from hetero.arch import families, rope, tensors
from hetero.arch.spec import GQA, MLA, Model
from hetero.engine.devices import place
from hetero.engine.engine import Engine
from hetero.engine.placed import PAGE
from hetero.engine.scheduler import Limits
from hetero.errors import BadOption, BadRequest, DoesNotFit, UnusableHardware
from hetero.memory import bank as banks
from hetero.memory import machine as machines
from hetero.memory import plan as plans
from hetero.memory import switch
from hetero.memory.packed import Progress
from hetero.model.experts import expert_layer
from hetero.model.step import single
from hetero.model.weights import Weights
from hetero.options import Options
from hetero.report import Report, reached, spans
from hetero.request import Output, Request, Sampling
from hetero.text import template, tokenizer
from hetero.text.reply import Answer, Chunk, Reply, collect, sampling_defaults, watcher
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.dummy import Dummy
from hetero.weights.source import EMBEDDED, Source, open_source
from hetero.wire.records import Info

if TYPE_CHECKING:
    from hetero.bridge.skeleton import Skeleton

Messages = Sequence[dict[str, Any]]
Prompt = str | Sequence[int] | Messages


class LLM:
    """A loaded model. `path_or_name`: a folder, a hub name, or None for the embedded model; options as keywords, or whole as `options`.

    Not thread-safe: one thread uses it. Raises the errors of `hetero.errors` before anything big is allocated where that is possible.
    """

    def __init__(self, path_or_name: str | Path | None = None, *, options: Options | None = None, progress: Progress = lambda *_: None,
                 **values: Any) -> None:
        if options is not None and values:
            raise BadOption("options were given both whole and as keywords", "give one of them")
        self.options = options or settings.resolve(values, given_as="argument")
        began = time.perf_counter()
        real = self.options.load_format != "dummy"
        if real and self.options.routing != "model":
            raise BadOption(f"routing = {self.options.routing!r}: only with dummy weights may somebody else than the model's router pick experts",
                            "--load-format dummy, or leave routing out")
        self.source: Source = open_source(path_or_name, partial(fetch, offline=self.options.offline, progress=progress, weights=real), real)
        self.name = self.source.name
        self.skeleton, self.options = bridge_to(self.source, self.options)
        self.model = self.skeleton.model if self.skeleton else self.source.spec().first(self.options.layers)
        self.tokenizer, self.template = read_text(self.source, real)
        self.sampling, self.sampling_sources = sampling_defaults(self.source.json("generation_config.json") or {})
        self.weights = open_weights(self.source, self.model, self.skeleton) if real else Dummy(self.model)
        if self.options.device != "cpu" and (trouble := machines.gpu_trouble()):
            raise UnusableHardware(trouble[0], f"{trouble[1]}; or --device cpu")
        self.machine = machines.this_machine(self.options.cache_dir, self.options.device)
        arriving = [self.weights.expert_arrives(l) for l in self.model.moe_layers]
        self.plan = plans.plan(self.model, self.machine, self.options, arriving or "bf16")
        if not self.plan.fits:
            raise DoesNotFit(f"{self.name} {self.plan.shortfall}", "; or ".join(self.plan.changes))
        torch.set_num_threads(1)                     # the team owns the cores
        self.team = Team(self.options.cores, self.options.threads)
        try:
            self._load(progress)
        except BaseException:
            self.team.close()
            raise
        self.load_s = time.perf_counter() - began

    def _load(self, progress: Progress) -> None:
        plan, model, options = self.plan, self.model, self.options
        self.isa = cpu.isa()
        self.bank = banks.load(self.weights, options.expert_format, options.cache_dir if options.packed_cache else None, self.team.threads, progress)
        self.layers = {l: expert_layer(banks.moe(model, l), self.bank.stores[l], self.bank.biases[l]) for l in model.moe_layers}
        self.switch = "" if options.deterministic else switch.tune(self.layers.values(), self.team, options.cache_dir)
        if self.skeleton:
            from hetero.bridge import place as bridge
            self.placed = bridge.place(plan, self.skeleton, options, self.weights, self.layers, self.team)
        else:
            self.placed = place(plan, model, options, Weights(tensors.of(model), self.weights.dense), self.layers, self.team, self.bank.arena,
                                self.machine)
        limits = Limits(plan.max_batch, plan.chunk, options.max_stall_ms / 1e3)
        self.vocab = min(self.tokenizer.size, model.vocab)
        self.engine = Engine(self.placed.run, self.placed.cache, self.vocab, plan.ctx, self.tokenizer.ends(), limits, seed=options.seed,
                             residents=self.placed.residents)
        self._inbox: dict[str, deque[Output]] = {}
        self._ids = count()

    # -- text -------------------------------------------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt: raw text, ids, or messages through the chat template. Raises BadRequest."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode_prompt(prompt))
        if all(isinstance(p, int) for p in prompt):
            return tuple(p for p in prompt if isinstance(p, int))
        if not all(isinstance(p, dict) for p in prompt):
            raise BadRequest("a prompt is text, token ids or a list of messages", param="prompt")
        if self.template is None:
            raise BadRequest(f"{self.name} has no chat template", "send a text prompt instead", param="messages")
        return self.template.prompt([p for p in prompt if isinstance(p, dict)]).ids

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | None = None) -> list[Answer]:
        """Answers to one prompt or to many at once, in order, `sampling.n` for each: texts, token ids or lists of messages. Raises BadRequest.

            with LLM("path/to/model", max_batch=64) as llm:
                for answer in llm.generate([f"Fact {i}:" for i in range(1000)], Sampling(temperature=0.0, max_tokens=40)):
                    print(answer.text, answer.finish_reason)

        `max_batch` decode at once and the others wait. What must survive a crash is a file and `hetero batch run`.
        """
        jobs = [self._reply(p, sampling or self.sampling) for p in each(prompts)]
        for id, replies in jobs:
            for output in self._outputs(id, len(replies)):
                replies[output.index].add(output)
            del self._inbox[id]
        return [answer for _, replies in jobs for answer in collect(replies)]

    def chat(self, messages: Messages, sampling: Sampling | None = None) -> Answer:
        """The answer to a conversation: [{"role": "user", "content": "..."}, ...]."""
        return self.generate(messages, sampling)[0]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Generator[Chunk, None, None]:
        """Chunks of the answer as they are made; closing the generator ends the request."""
        id, replies = self._reply(prompt, sampling or self.sampling)
        try:
            for output in self._outputs(id, len(replies)):
                yield replies[output.index].add(output)
        finally:
            self.engine.abort(id)
            self._inbox.pop(id, None)

    def _reply(self, prompt: Prompt, sampling: Sampling) -> tuple[str, list[Reply]]:
        id = f"r{next(self._ids)}"
        self.engine.add(Request(id, self.encode(prompt), sampling, watcher=watcher(self.tokenizer, sampling)))
        self._inbox[id] = deque()
        strip = not isinstance(prompt, str)
        return id, [Reply(self.tokenizer, sampling, i, strip) for i in range(sampling.n)]

    def _outputs(self, id: str, replies: int) -> Iterator[Output]:
        """The outputs of one request until all its sequences ended, stepping the engine for everybody."""
        inbox = self._inbox[id]
        while replies:
            while not inbox:
                for output in self.engine.step():
                    if output.id in self._inbox:
                        self._inbox[output.id].append(output)
            output = inbox.popleft()
            replies -= output.finish is not None
            yield output

    # -- evaluation -------------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], path: str = "prefill") -> torch.Tensor:
        """[T, V] float32: what the model says after each token, computed in prompt chunks or ("decode") token by token. Raises BadRequest."""
        if path not in ("prefill", "decode"):
            raise BadRequest(f"path is {path!r}", "prefill or decode", "path")
        if not 0 < len(token_ids) <= self.plan.ctx or not all(0 <= t < self.model.vocab for t in token_ids):
            raise BadRequest("token_ids must be 1 to " f"{self.plan.ctx} ids below {self.model.vocab}", param="token_ids")
        pages = -(-len(token_ids) // PAGE)
        cache = self.placed.fresh(pages)
        run = self.placed.replay(cache, pages) if path == "decode" else self.placed.run
        width = 1 if path == "decode" else self.plan.chunk
        rows = []
        for at, tokens in zip(count(0, width), torch.tensor(list(token_ids)).split(width), strict=False):
            step = single(tokens, at, PAGE, torch.arange(tokens.shape[0]), self.plan.device)
            rows.append(run(step, cache)[:, :self.vocab].clone().cpu())
        return torch.cat(rows)

    def info(self) -> Info:
        """What those who prepare requests must know, as plain data: also in another process, which reads the tokenizer from the files named here."""
        return describe(self.source, self.options, self.vocab, self.engine.context, self.engine.limits)

    # -- what really runs -------------------------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        filled, machine = self.bank.filled, self.machine
        assert filled is not None
        layers: dict[str, list[int]] = {}
        for l, origin in filled.origins.items():
            layers.setdefault(str(origin), []).append(l)
        kept = [origin + (f" (layers {spans(sorted(ls))})" if len(layers) > 1 else "") for origin, ls in sorted(layers.items())]
        team = self.team
        seats = f"{team.threads} thread{'s'[:team.threads - 1]} on core{'s'[:team.threads - 1]} {spans(sorted(team.cores))}: {team.reason}"
        facts = {"machine": f"{machine.name}, {machine.cores} cores, {self.isa}",
                 "team": seats + (", shared with another process" if team.shared else ""),
                 "experts": f"from {filled.by} in {filled.seconds:.1f} s: {'; '.join(kept)}",
                 "expert memory": f"{filled.nbytes / 2**20:.0f} MiB, {filled.huge}",
                 **({"packed cache": f"not written: {filled.cache_note}"} if filled.cache_note else {}),
                 "KV": f"{self.plan.kv_tokens} tokens in {self.plan.kv_dtype}"
                       + "".join(f", {g.tokens} in layers that see {g.window}" for g in self.plan.kv[1:]),
                 "planned": f"{self.plan.ram_bytes / 2**20:.0f} MiB, decode {self.plan.decode_tok_s:.0f} tok/s", "loaded in": f"{self.load_s:.1f} s",
                 **({"tile products": self.switch} if self.switch else {}),
                 **({"rope": f"frequencies are those of {self.plan.ctx} tokens for texts of any length: a smaller ctx keeps those of short ones"}
                    if rope.stretched((a.rope for x in self.model.layers if isinstance(a := x.attention, GQA | MLA)), self.plan.ctx) else {}),
                 **self.placed.facts,
                 **({} if self.placed.residents is None else {"expert cache": str(self.placed.residents)}),
                 **({"notes": "; ".join(self.source.notes)} if self.source.notes else {})}
        rows = tuple(self.placed.decoder.report())
        return Report(self.name, facts, rows, tuple(self.options.rows()), self.placed.checks, self.speeds())

    def speeds(self) -> dict[str, float]:
        """What was reached since the start, from counters, and the ceilings."""
        ring = self.placed.ring
        return reached(self.engine.stats(), self.machine, self._token_bytes, self.placed.residents, None if ring is None else ring.copied_bytes)

    @cached_property
    def _token_bytes(self) -> tuple[float, float]:
        """What the CPU reads of routed experts and of other weights for one token."""
        experts = dense = 0.0
        for layer, row in self.placed.decoder.report():
            if row.device != "cpu" or row.part == "embed":
                continue
            if row.part == "experts" and layer is not None:
                router = banks.moe(self.model, layer).router
                experts += row.nbytes * router.top_k / router.experts
            else:
                dense += row.nbytes
        return experts, dense

    def close(self) -> None:
        """Ends the threads and gives the memory back, the GPU's too; the model cannot be used any more."""
        self.team.close()
        placed = vars(self).pop("placed", None)
        for name in ("engine", "bank", "layers"):
            vars(self).pop(name, None)
        if placed is not None and placed.pinned is not None:
            torch.cuda.synchronize(self.plan.device)
            placed.pinned.close()
            del placed
            gc.collect()                             # graphs, decoder and handoff know each other, and hold what the next model needs
            torch.cuda.empty_cache()
        if isinstance(self.weights, Checkpoint):
            self.weights.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fetch(name: str, offline: bool, progress: Progress, weights: bool = True) -> Path:
    """The folder of a hub name. The hub's library takes a third of a second to import, so only those pay who need it."""
    from hetero.weights import hub
    return hub.fetch(name, offline, progress=progress, weights=weights)


def describe(source: Source, options: Options, vocab: int, context: int, limits: Limits) -> Info:
    """A model for those who prepare requests; its texts, when they are inside the container, go along."""
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json") if source.gguf else ()
    files = {n: text for n in names if (text := source.text(n)) is not None}
    if files:
        files["config.json"] = json.dumps(source.config)
    sampling, sources = sampling_defaults(source.json("generation_config.json") or {})
    return Info(source.name, str(source.folder), vocab, context, sampling, sources, tuple(options.rows()), limits, files)


def each(prompts: Any) -> list[Any]:
    """One prompt as a list of one; many as they are."""
    return [prompts] if isinstance(prompts, str) or not prompts or isinstance(prompts[0], (int, dict)) else list(prompts)


def bridge_to(source: Source, options: Options) -> "tuple[Skeleton | None, Options]":
    """transformers' model without weights, for what no native row reads, and the options as it means them. transformers takes seconds to import,
    so only those pay who need it."""
    if source.gguf or families.native(source.config):
        return None, options
    from hetero.bridge import place as bridge
    from hetero.bridge.skeleton import build
    options = bridge.adjusted(options)
    return build(source.config, bridge.DTYPES[options.dtype]), options


def open_weights(source: Source, model: Model, skeleton: "Skeleton | None") -> Checkpoint:
    """The files' tensors, found and checked."""
    if skeleton is None:
        return Checkpoint(source, model)
    from hetero.bridge.files import Files
    return Files(source, skeleton)


def read_text(source: Source, real: bool) -> tuple[tokenizer.Tokenizer, template.Template | None]:
    """The tokenizer and the chat template, from the folder's files or from inside the container. Dummy weights make do with the embedded model's."""
    if not source.gguf:
        folder = source.folder if real or (source.folder / "tokenizer.json").is_file() else EMBEDDED
        found = tokenizer.read(folder)
        return found, template.read(folder, found)
    config = source.json("tokenizer_config.json") or {}
    found = tokenizer.from_json(source.text("tokenizer.json") or "", config, source.config, source.json("generation_config.json") or {}, source.name)
    text = config.get("chat_template")
    return found, template.try_out({"default": text}, source.name, found) if text else None
