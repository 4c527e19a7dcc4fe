#!/usr/bin/env python3
"""lm-eval (EleutherAI's harness) on one task through the server and through transformers: log-likelihoods and generations, sample by sample.

The task is made here from the texts that come with the embedded model: which of four ends belongs to a story (log-likelihood, multiple choice), and
an answer written until its end (generate_until). The reference is transformers in float32 on the same weights, dequantized; the bound is the
format's: per-token log-probabilities differ by sqrt(2 * KL) at most, 0.045 for the 1e-3 nats of int8_g32. Needs pip for its own environment.

    python scripts/lmeval.py [--samples 60] [--keep FOLDER] [SERVER FLAGS ...]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import reference
from endpoint import environment, server

BOUND = 0.045
LOCAL = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
CHOICE = """task: story_ends
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: ends
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WRITE = """task: written
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{ends[label]}}"
target_delimiter: ""
generation_kwargs: {until: ["<|im_end|>", "\\n\\n"], do_sample: false, temperature: 0.0, max_gen_toks: 32}
metric_list: [{metric: exact_match}]
"""


def make_tasks(folder: Path, samples: int) -> None:
    """Stories cut in the middle, each with its own end and three others'."""
    texts = [json.loads(line)["text"] for line in (reference.EMBEDDED / "eval" / "mixed.jsonl").read_text().splitlines()]
    stories = [t[:600].rsplit(" ", 1)[0] for t in texts if len(t) > 300]
    rng, rows = random.Random(0), []
    cut = [(s[: len(s) // 2].rsplit(" ", 1)[0], s[len(s[: len(s) // 2].rsplit(" ", 1)[0]):]) for s in stories]
    for i in range(samples):
        context, end = cut[i % len(cut)]
        others = rng.sample([e for _, e in cut if e != end], 3)
        ends = [end, *others]
        rng.shuffle(ends)
        rows.append({"context": context, "ends": ends, "label": ends.index(end)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for name, body in (("ends", CHOICE), ("written", WRITE)):
        (folder / f"{name}.yaml").write_text(LOCAL.format(file=folder / "rows.jsonl") + body)


def run(python: Path, folder: Path, name: str, model: str, arguments: str, *more: str) -> dict[str, list[Any]]:
    """One run of the harness (none when the folder has its results); its logged samples by task."""
    command = [python, "-m", "lm_eval", "--model", model, "--model_args", arguments, "--tasks", "story_ends,written", "--include_path", str(folder),
               "--output_path", str(folder / name), "--log_samples", "--batch_size", "1", *more]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_CACHE": str(folder / "cache")}
    if not any((folder / name).rglob("samples_written_*.jsonl")):
        done = subprocess.run(command, cwd=folder, env={**os.environ, **offline}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"lm_eval failed:\n{done.stderr[:3000]}\n...\n{done.stderr[-2000:]}")
    found = {}
    for task in ("story_ends", "written"):
        file = next((folder / name).rglob(f"samples_{task}_*.jsonl"))
        found[task] = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda s: s["doc_id"])
    return found


def compare(ours: dict[str, list[Any]], theirs: dict[str, list[Any]], lengths: list[list[int]]) -> dict[str, float]:
    apart, same, accs = [], [], ([], [])
    for a, b, tokens in zip(ours["story_ends"], theirs["story_ends"], lengths, strict=True):
        x, y = ([float(r[0][0]) for r in s["resps"]] for s in (a, b))
        apart += [abs(p - q) / n for p, q, n in zip(x, y, tokens, strict=True)]
        same.append(x.index(max(x)) == y.index(max(y)))
        accs[0].append(a["acc"])
        accs[1].append(b["acc"])
    texts = [a["resps"][0][0] == b["resps"][0][0] for a, b in zip(ours["written"], theirs["written"], strict=True)]
    return {"samples": len(same), "accuracy here": statistics.mean(accs[0]), "accuracy transformers": statistics.mean(accs[1]),
            "same choice": statistics.mean(same), "mean |difference| nats per token": statistics.mean(apart), "largest": max(apart),
            "same text of 32 tokens": statistics.mean(texts)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--keep", type=Path, help="folder for the task and the harness's own results")
    args, flags = parser.parse_known_args()
    python = environment("lm-eval", "lm-eval[api]>=0.4.9")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        make_tasks(folder, args.samples)
        floats = reference.folder(folder / "floats")
        theirs = run(python, folder, "transformers", "hf", f"pretrained={floats},dtype=float32,add_bos_token=False", "--device", "cpu")
        with server(None, "--served-model-name", "embedded", *flags) as (url, _):
            ours = run(python, folder, "server", "local-completions", f"model=embedded,base_url={url}/v1/completions,tokenizer={floats},"
                       "tokenizer_backend=huggingface,tokenized_requests=True,num_concurrent=4,max_length=1024,add_bos_token=False")
        from transformers import AutoTokenizer
        tok = AutoTokenizer.from_pretrained(floats)
        lengths = [[max(1, len(tok(s["doc"]["context"] + e).input_ids) - len(tok(s["doc"]["context"]).input_ids)) for e in s["doc"]["ends"]]
                   for s in ours["story_ends"]]
        found = compare(ours, theirs, lengths)
    for name, value in found.items():
        print(f"{name:36}{value:.4g}")
    return int(found["mean |difference| nats per token"] > BOUND)


if __name__ == "__main__":
    sys.exit(main())
