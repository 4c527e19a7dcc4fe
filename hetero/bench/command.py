"""The words of `hetero bench` and what each calls; measures nothing. Imports are inside functions, so that --help answers at once."""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.errors import BadOption
from hetero.options import Options, add_flags, from_flags

if TYPE_CHECKING:
    from hetero.bench.result import Result
    from hetero.llm import LLM

KINDS = "measured here, with its own noise; a ratio whose interval covers 1 is never called a gain"


def add(bench: argparse.ArgumentParser, shared: argparse.ArgumentParser) -> None:
    """The subcommands, under a parser of cli's; `shared` holds flags that every command has."""
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)

    def kind(name: str, run: Callable[[argparse.Namespace], "Result"], text: str) -> argparse.ArgumentParser:
        made = kinds.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}: {KINDS}.", parents=[shared])
        made.set_defaults(run=lambda args: show(run(args), args))
        made.add_argument("--json", action="store_true", help="facts, rows and notes as JSON")
        made.add_argument("--csv", action="store_true", help="the rows as CSV")
        made.add_argument("--plot", metavar="FOLDER", type=Path, help="write PNGs there too (pip install 'hetero-moe[plot]')")
        return made

    engine = "options of the engine"
    machine = kind("machine", run_machine, "what this machine can do at most: memory, products, PCIe, GPU; kept for the planner")
    add_flags(machine.add_argument_group(engine), ["device", "threads", "cores", "cache_dir", "config"])
    kernels = kind("kernels", run_kernels, "every format and instruction set by tokens per expert, as a share of the ceiling")
    kernels.add_argument("model", nargs="?", metavar="MODEL", help="whose expert shape: folder, config.json or hub name; none: 2048 x 768, top-8")
    kernels.add_argument("--formats", default="all", metavar="LIST", help="such as int4_g32,bf16 [all]")
    kernels.add_argument("--isas", default="all", metavar="LIST", help='such as avx2,amx; "": only the strongest here [all that run here]')
    kernels.add_argument("--tokens", default="", metavar="LIST", help="tokens per expert [1,2,4,8,16,64,256,1024]")
    kernels.add_argument("--seconds", type=float, default=3.0, metavar="S", help="most time for a row's rounds, three at least [3]")
    kernels.add_argument("--gib", type=float, default=3.5, help="memory that cold experts rotate through [3.5]")
    add_flags(kernels.add_argument_group(engine), ["threads", "cores", "offline", "config"])
    run = kind("run", run_run, "prefill and decode of a model by prompt length and batch, and where the time went")
    run.add_argument("model", nargs="?", metavar="MODEL", help="folder, GGUF file, hub name or config.json; not given: the embedded model")
    run.add_argument("--config-only", action="store_true", help="a bare config.json is enough: random weights (--load-format dummy)")
    run.add_argument("--prompts", default="128,512", metavar="LIST", help="prompt lengths in tokens [128,512]")
    run.add_argument("--batches", default="1,4", metavar="LIST", help="requests at once [1,4]")
    run.add_argument("--tokens", type=int, default=32, metavar="N", help="decoded after each prompt [32]")
    run.add_argument("--rounds", type=int, default=7, metavar="N", help="[7]")
    ab = kind("ab", run_ab, "two settings against each other in interleaved pairs")
    ab.add_argument("name", metavar="NAME", help="overlap, cache, stream, precision, kv_dtype, …: or any option, with two values")
    ab.add_argument("values", nargs="*", metavar="VALUE", help="the two sides, such as: threads 1 2")
    ab.add_argument("--model", metavar="MODEL", help="not given: the embedded model")
    ab.add_argument("--prompt", type=int, default=128, metavar="N", help="tokens [128]")
    ab.add_argument("--batch", type=int, default=1, metavar="N", help="requests at once [1]")
    ab.add_argument("--tokens", type=int, default=16, metavar="N", help="decoded after each prompt [16]")
    ab.add_argument("--pairs", type=int, default=35, metavar="N", help="[35]")
    quality = kind("quality", run_quality, "KL divergence, likeliest token and perplexity against a reference")
    quality.add_argument("model", nargs="?", metavar="MODEL", help="folder, GGUF file or hub name; not given: the embedded model")
    quality.add_argument("--reference", default="transformers", choices=("transformers", "bf16", "f32"),
                         help="transformers in float32 on the dequantized weights, or this engine in a format [transformers]")
    quality.add_argument("--text", type=Path, metavar="FILE", help='lines of text, or .jsonl with a "text" each [answers of the embedded model]')
    quality.add_argument("--lines", type=int, default=20, metavar="N", help="evenly spread over the file; 0: all [20]")
    quality.add_argument("--path", choices=("prefill", "decode", "both"), default="both")
    for each in (run, ab, quality):
        add_flags(each.add_argument_group(engine))
    add_serve(kind("serve", run_serve, "any OpenAI-compatible server under load, as its clients meet it"))


def add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8080")
    serve.add_argument("--model", default="", help="[the server's first]")
    serve.add_argument("--api-key-file", type=Path, metavar="FILE", help="its first line is sent as the key")
    serve.add_argument("--completions", action="store_true", help="/v1/completions in place of chat")
    serve.add_argument("--conversations", type=int, default=50, metavar="N", help="[50]")
    serve.add_argument("--concurrency", type=int, default=4, metavar="N", help="conversations at any time [4]")
    serve.add_argument("--rate", type=float, metavar="R", help="conversations per second that begin, at random (Poisson), in place of --concurrency")
    serve.add_argument("--prompt-length", default="uniform:64-192", metavar="DIST",
                       help="in words: 512, uniform:A-B, normal:MEAN,SD, lognormal:MEDIAN,SIGMA")
    serve.add_argument("--output-length", default="64", metavar="DIST", help="most tokens of an answer [64]")
    serve.add_argument("--turns", type=int, default=1, metavar="N", help="of each conversation, each with what was said before [1]")
    serve.add_argument("--ignore-eos", action="store_true", help='send "ignore_eos": true, which vLLM, llama.cpp and hetero take: answers as long')
    serve.add_argument("--extra", default="{}", metavar="JSON", help="fields added to each request")
    serve.add_argument("--max-ttft-ms", type=float, metavar="MS", help="limit for goodput")
    serve.add_argument("--max-tpot-ms", type=float, metavar="MS", help="limit for goodput")
    serve.add_argument("--max-total-ms", type=float, metavar="MS", help="limit for goodput")
    serve.add_argument("--time-limit", type=float, default=600.0, metavar="S", help="without a byte from the server [600]")
    serve.add_argument("--seed", type=int, default=0, help="of lengths, words and moments [0]")


def show(result: "Result", args: argparse.Namespace) -> int:
    """Data on stdout; where pictures went on stderr."""
    print(result.json() if args.json else result.csv() if args.csv else result.text(), end="" if args.csv and not args.json else "\n")
    if args.plot:
        from hetero.bench.result import draw

        for path in draw(result, args.plot):
            say(f"wrote {path}")
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def numbers(text: str, flag: str) -> list[int]:
    try:
        found = [int(n) for n in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise BadOption(f"{flag} {text!r} cannot be meant", "whole numbers above 0, such as 128,512")
    return found


def positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if (value := getattr(args, name)) is not None and value <= 0:
            raise BadOption(f"--{name.replace('_', '-')} {value} cannot be meant", "a number above 0")


def opened(name: str | None, options: Options) -> "LLM":
    from hetero.llm import LLM
    from hetero.report import announce_compiles

    announce_compiles()
    return LLM(name, options=options)


def run_machine(args: argparse.Namespace) -> "Result":
    from hetero.bench import machine

    return machine.bench(from_flags(args))


def run_kernels(args: argparse.Namespace) -> "Result":
    from hetero.bench import kernels

    positive(args, "seconds", "gib")
    options = from_flags(args)
    wanted = kernels.task(kernels.model_of(args.model, options), args.formats, args.isas, args.tokens, args.seconds, args.gib)
    return kernels.bench(wanted, options, say)


def run_run(args: argparse.Namespace) -> "Result":
    from hetero.bench import speed

    positive(args, "tokens", "rounds")
    prompts, batches, options = numbers(args.prompts, "--prompts"), numbers(args.batches, "--batches"), from_flags(args)
    if args.config_only:
        options = options.with_values("--config-only", load_format="dummy")
    if max(batches) > options.max_batch:
        options = options.with_values("--batches", max_batch=max(batches))
    if options.source("max_stall_ms") == "default":
        options = options.with_values("bench run", max_stall_ms=60_000.0)    # prompts are read first and together, then all decode
    with closing(opened(args.model, options)) as llm:
        return speed.bench(llm, prompts, batches, args.tokens, args.rounds, say)


def run_ab(args: argparse.Namespace) -> "Result":
    from hetero.bench import ab

    positive(args, "prompt", "batch", "tokens")
    asked = ab.question(args.name, args.values)
    return ab.bench(asked, lambda options: opened(args.model, options), from_flags(args), args.prompt, args.batch, args.tokens, args.pairs, say)


def run_quality(args: argparse.Namespace) -> "Result":
    from hetero.bench import quality

    options, text = from_flags(args), args.text or quality.TEXT
    lines = quality.texts(text, max(0, args.lines))
    paths = quality.PATHS if args.path == "both" else (args.path,)
    with closing(opened(args.model, options)) as llm:
        if args.reference == "transformers":
            return quality.bench(llm, quality.by_transformers(llm), "transformers, float32", lines, text, paths)
        exact = quality.exact_options(options, args.reference).with_values("reference", cores=llm.team.cores)
        with closing(opened(args.model, exact)) as judge:
            return quality.bench(llm, judge.logits, f"this engine, experts and dense {args.reference}, KV float32", lines, text, paths)


def run_serve(args: argparse.Namespace) -> "Result":
    try:
        from hetero.bench import load
    except ImportError as missing:
        raise BadOption(f"bench serve needs {missing.name}, and it is not installed", "pip install 'hetero-moe[bench]'") from missing
    from hetero.bench.arrivals import Load, lengths

    positive(args, "conversations", "concurrency", "rate", "turns", "max_ttft_ms", "max_tpot_ms", "max_total_ms", "time_limit")
    extra = fields(args.extra) | ({"ignore_eos": True} if args.ignore_eos else {})
    try:
        key = args.api_key_file.read_text().split("\n")[0].strip() if args.api_key_file else ""
    except OSError as why:
        raise BadOption(f"--api-key-file {args.api_key_file}: {why.strerror}", "a file with the key in its first line") from why
    target = load.Target(load.address(args.url), args.model, key, not args.completions, tuple(extra.items()), args.time_limit)
    wanted = Load(args.conversations, args.concurrency, args.rate, lengths(args.prompt_length, "--prompt-length"),
                  lengths(args.output_length, "--output-length"), args.turns, args.seed)
    limits = load.Limits(*(v / 1e3 if v is not None else None for v in (args.max_ttft_ms, args.max_tpot_ms, args.max_total_ms)))
    return load.bench(target, wanted, limits, say)


def fields(text: str) -> dict[str, Any]:
    """A JSON object of more fields for a request."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadOption(f"--extra {text!r} is no JSON object", """such as --extra '{"temperature": 0}'""")
    return found
