#!/usr/bin/env python3
"""Quality of what the engine says: teacher-forced KL(reference || engine) per token in nats, and how often the likeliest token is the same.

The reference is transformers in float32 on the model's own weights, dequantized. Each line of the text is tokenised alone, the end token
appended, its first 512 tokens used; every token after the first counts. Both paths of `logits` are measured, for they round differently.

    python scripts/quality.py [MODEL] [--lines 20] [--text FILE.jsonl] [--expert-format int4_g32] [--json]
"""
import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hetero.arch import tensors
from hetero.llm import LLM
from hetero.memory.bank import dequantize
from hetero.options import add_flags, from_flags
from hetero.weights.source import EMBEDDED

TEXT = EMBEDDED.parent / "eval" / "teacher.jsonl"
TOKENS = 512


def reference(llm: LLM) -> torch.nn.Module:
    """The same weights as floats, in transformers."""
    import transformers

    transformers.logging.disable_progress_bar()
    weights, found = llm.weights, {}
    for t in tensors.of(llm.model):
        if t.home == "dense":
            found[t.name] = weights.dense(t).float().contiguous()
        elif not t.key.endswith(".bias"):
            found[t.name] = torch.from_numpy(dequantize(getattr(weights.expert(t.layer, t.expert), t.key.split(".")[1]))).clone()
    config = {k: v for k, v in llm.source.config.items() if k != "quantization_config"} | {"torch_dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        save_file(found, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def measure(llm: LLM, lines: list[str], paths: list[str]) -> dict[str, dict[str, float]]:
    """Per path: mean KL, share of equal top-1, the worst difference between logits, perplexities, tokens, seconds."""
    model = reference(llm)
    sums = {path: dict.fromkeys(("kl", "top1", "reference_nll", "engine_nll", "tokens", "seconds", "largest"), 0.0) for path in paths}
    for line in lines:
        ids = [*llm.tokenizer.encode(line), 0][:TOKENS]
        with torch.no_grad():
            raw = model(torch.tensor([ids])).logits[0, :-1, :llm.vocab]
        want, after = raw.log_softmax(-1), torch.tensor(ids[1:])[:, None]
        for path, s in sums.items():
            began = time.perf_counter()
            logits = llm.logits(ids, path)[:-1]
            s["seconds"] += time.perf_counter() - began
            got = logits.log_softmax(-1)
            s["kl"] += (want.exp() * (want - got)).sum().item()
            s["top1"] += (want.argmax(-1) == got.argmax(-1)).sum().item()
            s["reference_nll"] -= want.gather(-1, after).sum().item()
            s["engine_nll"] -= got.gather(-1, after).sum().item()
            s["largest"] = max(s["largest"], (raw - logits).abs().max().item())
            s["tokens"] += len(ids) - 1
    return {path: {k: v / s["tokens"] if k in ("kl", "top1", "reference_nll", "engine_nll") else v for k, v in s.items()} for path, s in sums.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="a folder or hub name; none: the embedded model")
    parser.add_argument("--text", type=Path, default=TEXT, help="JSON lines with a text each")
    parser.add_argument("--lines", type=int, default=20, help="how many lines, evenly spread over the file; 0: all")
    parser.add_argument("--path", choices=("prefill", "decode", "both"), default="both")
    parser.add_argument("--json", action="store_true")
    add_flags(parser)
    args = parser.parse_args()
    texts = [json.loads(line)["text"] for line in args.text.read_text().splitlines() if line.strip()]
    chosen = texts[::max(1, len(texts) // args.lines)][:args.lines] if args.lines else texts
    with contextlib.redirect_stdout(sys.stderr):
        llm = LLM(args.model, options=from_flags(args))
    with llm:
        found = measure(llm, chosen, ["prefill", "decode"] if args.path == "both" else [args.path])
        formats = "+".join(sorted(set(llm.bank.formats.values())))
    if args.json:
        print(json.dumps({"model": llm.name, "expert_format": formats, "dense_format": llm.plan.dense_format, "lines": len(chosen), "paths": found}))
        return 0
    print(f"{llm.name}, experts {formats}, dense {llm.plan.dense_format}: {len(chosen)} lines of {args.text.name}")
    for path, s in found.items():
        print(f"  {path:8} KL {s['kl']:.2e} nats/token   top-1 {s['top1']:.4f}   nll {s['reference_nll']:.4f} -> {s['engine_nll']:.4f}   "
              f"largest logit difference {s['largest']:.3f}   {s['tokens']:.0f} tokens at {s['tokens'] / s['seconds']:.0f}/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
