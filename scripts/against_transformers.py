"""Decode speed of the embedded model against transformers' generate: same weights, same machine, same threads, interleaved pairs.

Usage: python scripts/against_transformers.py [--tokens 64] [--pairs 35] [--json FILE]
"""

import argparse
import json
import os
import platform
from pathlib import Path

import psutil
import reference
import torch
import transformers

import hetero
from hetero.bench.timer import interleave, ratio, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated in one run")
    parser.add_argument("--pairs", type=int, default=35)
    parser.add_argument("--json", default="", help="write the figures here too")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))

    llm = hetero.LLM()
    prompt = llm.encode("Once upon a time there was a little fox who")
    greedy = hetero.Sampling(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    dtypes = {"transformers float32": torch.float32, "transformers bfloat16": torch.bfloat16}
    models = {name: reference.model(dtype) for name, dtype in dtypes.items()}
    ids = torch.tensor([prompt])

    def with_transformers(name: str) -> None:
        torch.set_num_threads(cores)
        settings = transformers.GenerationConfig(max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=False, pad_token_id=0)
        with torch.inference_mode():
            models[name].generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)

    def with_hetero() -> None:
        torch.set_num_threads(1)
        llm.generate([prompt], greedy)

    times = interleave({"hetero": with_hetero} | {name: lambda name=name: with_transformers(name) for name in models}, args.pairs)
    print(f"{platform.processor() or platform.machine()}, {cores} cores, {psutil.virtual_memory().total >> 30} GiB; "
          f"torch {torch.__version__}, transformers {transformers.__version__}; {args.tokens} tokens after {len(prompt)}, greedy")
    figures = {}
    for name, seconds in times.items():
        speed = args.tokens / sorted(seconds)[len(seconds) // 2]
        gain = ratio(seconds, times["hetero"])
        figures[name] = {"tok_s": speed, "spread": spread(seconds), "over_hetero": [gain.median, gain.low, gain.high]}
        print(f"{name:24s} {speed:8.1f} tok/s  ± {100 * spread(seconds):.0f} %" + ("" if name == "hetero" else f"   hetero is {gain} times as fast"))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))
    llm.close()


if __name__ == "__main__":
    main()
