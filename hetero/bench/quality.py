"""`hetero bench quality`: what the engine says against a reference on a text: KL, likeliest token, perplexity; on both paths of `LLM.logits`.

Each line of the text is tokenised alone, the end token appended, its first 512 tokens used; every token after the first counts. References:
"transformers" (float32 on the model's own weights, dequantized; nothing of ours) and the engine itself in a named format ("bf16", "f32").
"""

import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hetero.arch import tensors
from hetero.bench.result import Result, Row, machine_facts
from hetero.errors import BadOption
from hetero.llm import LLM
from hetero.memory.bank import dequantize
from hetero.options import Options
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.source import EMBEDDED

TEXT = EMBEDDED.parent / "eval" / "teacher.jsonl"
TOKENS = 512
PATHS = ("prefill", "decode")
REFERENCES = ("transformers", "bf16", "f32")
Says = Callable[[Sequence[int]], Tensor]                 # token ids -> [T, V] float32 on the CPU


def texts(file: Path, lines: int) -> list[str]:
    """`lines` texts (0: all), evenly spread over a file of JSON lines with a "text" each, or of plain lines. Raises BadOption."""
    try:
        found = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if file.suffix == ".jsonl":
            found = [str(json.loads(line)["text"]) for line in found]
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise BadOption(f"--text {file}: {why}", 'lines of text, or JSON lines with {"text": …} in a .jsonl file') from why
    if not found:
        raise BadOption(f"--text {file}: no line in it", "one text per line")
    return found[::max(1, len(found) // lines)][:lines] if lines else found


def reference(llm: LLM) -> torch.nn.Module:
    """The same weights as floats, in transformers. Raises BadOption for a model without weights of its own."""
    import transformers

    weights = llm.weights
    if not isinstance(weights, Checkpoint):
        raise BadOption("transformers as the reference needs real weights", "leave --load-format dummy out, or --reference bf16")
    transformers.logging.disable_progress_bar()
    found = {}
    for t in tensors.of(llm.model):
        if t.home == "dense":
            found[t.name] = weights.dense(t).float().contiguous()
        elif t.layer is not None and t.expert is not None and not t.key.endswith(".bias"):
            e = weights.expert(t.layer, t.expert)
            matrix = {"gate": e.gate, "up": e.up, "down": e.down}[t.key.split(".")[1]]
            assert matrix is not None
            found[t.name] = torch.from_numpy(dequantize(matrix)).clone()
    config = {k: v for k, v in llm.source.config.items() if k != "quantization_config"} | {"torch_dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        save_file(found, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        made: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return made


def by_transformers(llm: LLM) -> Says:
    model = reference(llm)

    @torch.no_grad()
    def says(ids: Sequence[int]) -> Tensor:
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0, :, :llm.vocab]
        return logits
    return says


def exact_options(options: Options, format: str) -> Options:
    """The same model with nothing lossy but what its own weights lost: experts and dense matrices in `format`, KV in float32."""
    return options.with_values("reference", expert_format=format, dense_format=format, kv_dtype="float32", precision="accurate", packed_cache=False)


class Sums:
    """What adds up over the lines of one path; `kl_of` keeps (KL, tokens) by line for the interval."""

    def __init__(self) -> None:
        self.same = self.reference_nll = self.engine_nll = self.largest = self.seconds = 0.0
        self.kl_of: list[tuple[float, int]] = []

    def take(self, theirs: Tensor, ours: Tensor, after: Tensor, seconds: float) -> None:
        """theirs and ours [T, V] logits, after [T] the tokens that came."""
        want, got, at = theirs.log_softmax(-1), ours.log_softmax(-1), after[:, None]
        self.kl_of.append(((want.exp() * (want - got)).sum().item(), len(after)))
        self.same += (want.argmax(-1) == got.argmax(-1)).sum().item()
        self.reference_nll -= want.gather(-1, at).sum().item()
        self.engine_nll -= got.gather(-1, at).sum().item()
        self.largest = max(self.largest, (theirs - ours).abs().max().item())
        self.seconds += seconds

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.kl_of)

    def row(self, path: str) -> Row:
        n = self.tokens
        low, high = bootstrap(self.kl_of)
        return {"path": path, "KL": sum(k for k, _ in self.kl_of) / n, "KL 95 %": f"{low:.2e} to {high:.2e}", "top-1": self.same / n,
                "reference perplexity": math.exp(self.reference_nll / n), "perplexity": math.exp(self.engine_nll / n),
                "largest logit difference": self.largest, "tokens": n, "tokens/s": n / self.seconds}


def bootstrap(pairs: Sequence[tuple[float, int]], draws: int = 1000, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of Σ values / Σ counts by drawing lines anew (percentile bootstrap, Efron 1979): tokens of one line are no independent samples."""
    draw = random.Random(0)
    means = []
    for _ in range(draws):
        chosen = draw.choices(pairs, k=len(pairs))
        means.append(sum(v for v, _ in chosen) / sum(n for _, n in chosen))
    means.sort()
    cut = int(draws * (1 - confidence) / 2)
    return means[cut], means[-1 - cut]


def measure(llm: LLM, says: Says, lines: Sequence[str], paths: Sequence[str] = PATHS) -> dict[str, Sums]:
    """The sums by path."""
    found = {path: Sums() for path in paths}
    end = min(llm.tokenizer.ends(), default=0)
    for line in lines:
        ids = [*llm.tokenizer.encode(line), end][:min(TOKENS, llm.plan.ctx)]
        if len(ids) < 2:
            continue
        theirs = says(ids)[:-1, :llm.vocab]
        for path, sums in found.items():
            began = time.perf_counter()
            ours = llm.logits(ids, path)[:-1]
            sums.take(theirs, ours, torch.tensor(ids[1:]), time.perf_counter() - began)
    return found


def bench(llm: LLM, says: Says, named: str, lines: Sequence[str], text: Path, paths: Sequence[str]) -> Result:
    found = measure(llm, says, lines, paths)
    if not any(s.tokens for s in found.values()):
        raise BadOption(f"--text {text}: no line has two tokens", "longer lines")
    facts: dict[str, Any] = machine_facts(llm.team.threads) | {
        "model": llm.name, "reference": named, "experts": ", ".join(sorted(set(llm.bank.formats.values()))), "dense": llm.plan.dense_format,
        "KV": llm.plan.kv_dtype, "precision": llm.options.precision, "text": f"{len(lines)} lines of {text.name}"}
    return Result("quality", facts, [s.row(path) for path, s in found.items()],
                  ["KL(reference || engine) in nats per token; its interval draws lines anew. Paths: prompt chunks, and token by token."])
