"""`python -m cpu_kernels`: the command line of `measure`. Knows nothing of how things are measured."""
import argparse
import json
import sys

from . import Team, measure


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cpu_kernels", description="GB/s and TOPS of every format against this machine's own ceilings.")
    parser.add_argument("--shape", default="2048x768", help="hidden × inter of an expert (default: Qwen3-30B-A3B's)")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--formats", default="int4_g32,int8_g32,bf16")
    parser.add_argument("--isas", default="", help="instruction sets, such as avx2,avx512_vnni; default: the strongest here")
    parser.add_argument("--tokens", type=numbers, default=measure.Task.tokens, help="tokens per expert; up to 8 as decode, more as prefill")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--gib", type=float, default=3.5, help="memory that the experts rotate through")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="the rows as JSON on stdout")
    args = parser.parse_args()
    hidden, inter = (int(n) for n in args.shape.split("x"))
    task = measure.Task(hidden, inter, args.top_k, True, tuple(args.formats.split(",")), tuple(i for i in args.isas.split(",") if i), args.tokens,
                        args.gib, args.rounds)
    with Team(threads=args.threads) as team, team.seat():
        machine = measure.machine(team)
        print("  ".join(f"{k} {v}" for k, v in machine.items()), file=sys.stderr)
        rows = measure.measure(task, team, lambda row: print(measure.line(row), file=sys.stderr))
    if args.json:
        print(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
