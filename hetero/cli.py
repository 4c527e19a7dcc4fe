"""The door: commands and their flags; knows which floor does what and does nothing itself.

Imports are inside functions, so that --help and --version answer at once. Exit codes: 0 done, 1 could not be done, 2 asked wrongly, 130 stopped.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hetero import __version__
from hetero.batch import command as batch
from hetero.bench import command as bench
from hetero.errors import BadOption, BadRequest, HeteroError
from hetero.options import Options, add_flags, from_flags

if TYPE_CHECKING:
    from hetero.llm import LLM
    from hetero.request import Sampling

SAMPLING: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy"), "top_k": (int, "0 is off"), "top_p": (float, "1 is off"), "min_p": (float, "0 is off"),
    "repetition_penalty": (float, "1 is off"), "presence_penalty": (float, "0 is off"), "frequency_penalty": (float, "0 is off"),
    "max_tokens": (int, "most tokens of an answer; not set: until the context is full"), "min_tokens": (int, "no end before so many tokens")}
EXAMPLES = """examples:
  hetero chat                                   talk to the small embedded model
  hetero chat Qwen/Qwen3-30B-A3B                fetch a model from the hub and talk to it
  hetero generate "Once upon a time" --model ./folder --max-tokens 100
  hetero plan ./folder --vram 8G --ram 64G      what would go where, and how fast, before loading anything
  hetero doctor                                 what this machine is, and what stands in the way"""


def parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error came from")
    top = argparse.ArgumentParser("hetero", description="Run mixture-of-experts models far larger than the graphics card.", epilog=EXAMPLES,
                                  formatter_class=argparse.RawDescriptionHelpFormatter, parents=[shared])
    top.add_argument("--version", action="version", version=f"hetero {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int] | None, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=[shared])
        if run is not None:                    # its own commands say what they run
            made.set_defaults(run=run)
        return made

    chat = command("chat", run_chat, "talk to a model; without one, to the small embedded model")
    chat.add_argument("model", nargs="?", metavar="MODEL", help="folder, GGUF file or hub name")
    chat.add_argument("-p", "--prompt", help="one message, one answer; text that is piped in is added to it")
    chat.add_argument("--system", default="", help="system message")
    generate = command("generate", run_generate, "continue a text, or answer it with --chat")
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; not given: stdin")
    generate.add_argument("--model", metavar="MODEL", help="folder, GGUF file or hub name; not given: the embedded model")
    generate.add_argument("--chat", action="store_true", help="put the text into the model's chat template as one user message")
    generate.add_argument("--json", action="store_true", help="print text, token_ids, finish_reason and timings as JSON")
    for each in (chat, generate):
        add_sampling(each)
        add_flags(each.add_argument_group("options of the engine"))
    plan = command("plan", run_plan, "tell what would go where, and how fast it would be, before anything is loaded")
    plan.add_argument("model", nargs="?", metavar="MODEL", help="folder, config.json or hub name; not given: the embedded model")
    plan.add_argument("--config-only", action="store_true", help="a bare config.json is enough: take its word for the weights")
    plan.add_argument("--suggest", action="store_true", help="no model: which known ones fit this machine")
    report = command("report", run_report, "load a model, test its kernels, run 8 steps, and tell what ran where")
    report.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub name; not given: the embedded model")
    report.add_argument("--long", action="store_true", help="every option, also those that were not set")
    for each in (plan, report):
        each.add_argument("--json", action="store_true")
        add_flags(each.add_argument_group("options of the engine"))
    bench.add(command("bench", None, "measure this machine, the kernels, a model, a setting, a server"), shared)
    add_serve(command("serve", run_serve, "serve a model to OpenAI and Anthropic clients and to a browser (also: hetero-serve)"))
    batch.add(command("batch", None, "answer every row of a file, here or on a Ray cluster"), shared, add_sampling, [*SAMPLING], open_model)
    cache = command("cache", run_cache, "list or remove packed experts kept on disk")
    cache.add_argument("do", choices=("list", "rm", "prune"))
    cache.add_argument("names", nargs="*", metavar="NAME", help="rm: keys (four letters are enough) or model names")
    cache.add_argument("--keep", metavar="SIZE", default=argparse.SUPPRESS, help="prune: keep the most recently used up to this size, such as 50G")
    cache.add_argument("--unused", metavar="DAYS", type=float, default=argparse.SUPPRESS, help="prune: remove what was not used for so many days")
    cache.add_argument("--json", action="store_true")
    add_flags(cache, ["cache_dir", "config"])
    doctor = command("doctor", run_doctor, "tell what this machine is and what stands in the way")
    doctor.add_argument("--json", action="store_true")
    add_flags(doctor, ["cache_dir", "config"])
    return top


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: a number from 0 to 65535")
    return int(text)


def add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub name; not given: the embedded model")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    serve.add_argument("--port", type=port, default=8080, metavar="PORT", help="[8080]; 0: any that is free")
    serve.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME", help="what clients call the model; answers bear the first")
    serve.add_argument("--api-key-file", metavar="FILE", help="keys that clients must send, one a line; only its owner may read it")
    serve.add_argument("--admin-key-file", metavar="FILE", help="keys for loading and unloading models, likewise; without it nobody can")
    serve.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="a web page that may ask; may be given again")
    serve.add_argument("--max-requests", type=int, default=64, metavar="N", help="most requests running or waiting; more get 429 [64]")
    serve.add_argument("--max-body", default="16M", metavar="SIZE", help="largest request [16M]")
    serve.add_argument("--time-limit", type=float, default=3600, metavar="S", help="longest time for one answer, in seconds [3600]")
    serve.add_argument("--drain-timeout", type=float, default=60, metavar="S", help="on SIGTERM: time to finish what runs [60]")
    serve.add_argument("--tool-format", default="auto", metavar="NAME", help="how the model writes reasoning and calls; auto: its template tells")
    serve.add_argument("--chat-template", metavar="FILE", help="jinja file in place of the model's own template")
    serve.add_argument("--merge-system", action="store_true", help="join system messages in front, for templates that insist")
    serve.add_argument("--merge-consecutive", action="store_true", help="join consecutive messages of one role")
    serve.add_argument("--log-json", action="store_true", help="logs as JSON, one a line")
    add_flags(serve.add_argument_group("options of the engine"))


def add_sampling(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("sampling", "What is not set is the model's own recommendation (generation_config.json).")
    for name, (kind, text) in SAMPLING.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, default=argparse.SUPPRESS, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", default=argparse.SUPPRESS, metavar="TEXT", help="end before this text; may be given again")
    group.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on after the model's end token")


def sampling(args: argparse.Namespace, model: "LLM") -> "Sampling":
    """The model's defaults with what the flags say."""
    given: dict[str, Any] = {k: v for k, v in vars(args).items() if k in SAMPLING or k == "ignore_eos"}
    if "stop" in args:
        given["stop"] = tuple(args.stop)
    return replace(model.sampling, **given)


class Bar:
    """Progress on stderr, in bytes: one line that is written over on a terminal, nothing elsewhere."""

    def __init__(self) -> None:
        self.shown, self.drawn_s = "", 0.0

    def __call__(self, doing: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty() or (now - self.drawn_s < 0.1 and done < total):
            return
        share, width = min(1.0, done / total) if total else 1.0, 24
        text = f"{doing} [{'#' * round(share * width):{width}}] {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB"
        sys.stderr.write("\r" + text.ljust(len(self.shown)))
        sys.stderr.flush()
        self.shown, self.drawn_s = text, now

    def clear(self) -> None:
        if self.shown:
            sys.stderr.write("\r" + " " * len(self.shown) + "\r")
            self.shown = ""


def open_model(name: str | None, options: Options) -> "LLM":
    from hetero.llm import LLM
    from hetero.report import announce_compiles

    announce_compiles()
    bar = Bar()
    try:
        return LLM(name, options=options, progress=bar)
    finally:
        bar.clear()


def greeting(model: "LLM") -> str:
    """What is talking, in one line."""
    embedded = model.source.embedded
    limits = " (very small: simple English only, knows little, for trying things out)" if embedded else ""
    return f"hetero {__version__}, {model.name}{limits}"


def piped() -> str:
    """What stdin holds when it is no terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as e:
        raise BadRequest(f"stdin is not UTF-8: {e}", "convert the text first") from e


def run_chat(args: argparse.Namespace) -> int:
    from contextlib import closing

    from hetero.chat import Console, Talk, once, say, terminal
    from hetero.options import state_folder

    options = from_flags(args)
    text = "\n\n".join(t for t in (args.prompt or "", piped().strip()) if t)
    interactive = not text and sys.stdin.isatty()
    if not text and not interactive:
        raise BadOption("nothing to answer: stdin is empty and there is no --prompt", 'hetero chat --prompt "Why is the sky blue?"')
    with closing(open_model(args.model, options)) as model:
        if model.template is None:
            raise BadRequest(f"{model.name} has no chat template", "hetero generate continues a text without one")
        talk = Talk(sampling(args, model), args.system)
        say(greeting(model))
        return Console(model, talk, terminal(state_folder() / "history")).run() if interactive else once(model, talk, text)


def run_generate(args: argparse.Namespace) -> int:
    from contextlib import closing

    options = from_flags(args)
    prompt = args.prompt if args.prompt is not None else piped()
    if not prompt:
        raise BadOption("no prompt: give one, or pipe it in", 'hetero generate "Once upon a time"')
    with closing(open_model(args.model, options)) as model:
        asked = sampling(args, model)
        given: Any = [{"role": "user", "content": prompt}] if args.chat else prompt
        if args.json:
            found = model.generate(given, asked)[0]
            print(json.dumps({"text": found.text, "token_ids": found.token_ids, "finish_reason": found.finish_reason, "seed": found.seed,
                              "timings": found.timings.as_dict()}, ensure_ascii=False))
            return int(found.finish_reason == "error")
        finish = None
        for chunk in model.stream(given, asked):
            print(chunk.text, end="", flush=True)
            finish = chunk.finish
            if chunk.error:
                print(f"\nerror: {chunk.error}", file=sys.stderr)
        print()
        return int(finish == "error")


def run_plan(args: argparse.Namespace) -> int:
    from hetero import forecast
    from hetero.memory import table

    options = from_flags(args)
    if args.suggest:
        return run_suggest(options, args.json)
    plan, machine = forecast.forecast(args.model, options, args.config_only)
    print(json.dumps(table.record(plan, machine)) if args.json else table.text(plan, machine))
    return 0 if plan.fits else 1


def run_suggest(options: Options, as_json: bool) -> int:
    from dataclasses import asdict

    from hetero.memory import suggest
    from hetero.memory.machine import this_machine
    from hetero.memory.plan import imagined

    machine = imagined(this_machine(options.cache_dir, options.device), options)
    print(json.dumps([asdict(s) for s in suggest.suggest(machine)]) if as_json else "\n".join(suggest.lines(machine)))
    return 0


def run_report(args: argparse.Namespace) -> int:
    from contextlib import closing

    options = from_flags(args)
    with closing(open_model(args.model, options)) as model:
        ids = model.tokenizer.encode_prompt("Hello") or [0]
        model.generate([ids], replace(model.sampling, max_tokens=8, ignore_eos=True))
        found = model.report()
        print(json.dumps(found.record(), default=str) if args.json else found.text(args.long))
        return int(not all(c.passed for c in found.checks))


def run_serve(args: argparse.Namespace) -> int:
    from pathlib import Path

    from hetero.options import notify_address, size

    options = from_flags(args)
    try:
        from hetero.serve.door import Settings
        from hetero.serve.run import Place, read_keys, serve
    except ImportError as e:
        raise BadOption(f"the server's packages are not installed ({e.name})", "pip install 'hetero-moe[serve]'") from e
    try:
        body = size(args.max_body) or 16 << 20
    except ValueError as e:
        raise BadOption(f"--max-body {args.max_body!r} cannot be meant", f"expected {e}") from e
    merge = frozenset(name for name, on in (("system", args.merge_system), ("consecutive", args.merge_consecutive)) if on)
    keys = read_keys(Path(args.api_key_file)) if args.api_key_file else ()
    admins = read_keys(Path(args.admin_key_file), "--admin-key-file") if args.admin_key_file else ()
    settings = Settings(tuple(args.served_model_name), keys, admins, tuple(args.cors_origin), body, args.time_limit, args.drain_timeout,
                        args.tool_format, Path(args.chat_template) if args.chat_template else None, merge)
    place = Place(args.host, args.port, args.max_requests, args.log_json)
    return serve(args.model, options, settings, place, notify_address())


def serve_main() -> int:
    """The command `hetero-serve` is `hetero serve`."""
    return main(["serve", *sys.argv[1:]])


def run_cache(args: argparse.Namespace) -> int:
    from dataclasses import asdict
    from datetime import datetime

    from hetero.memory import packed
    from hetero.memory.plan import size as spoken
    from hetero.options import size

    folder = from_flags(args).cache_dir
    if args.names and args.do != "rm":
        raise BadOption(f"cache {args.do} takes no names", "hetero cache rm NAME")
    if args.do == "list":
        found = packed.entries(folder)
    elif args.do == "rm":
        if not args.names:
            raise BadOption("cache rm needs a name", "hetero cache list shows them; hetero cache prune --keep 0 removes all")
        found = packed.remove(folder, args.names)
    else:
        try:
            keep = size(args.keep) if "keep" in args else None
        except ValueError as e:
            raise BadOption(f"--keep {args.keep!r} cannot be meant", f"expected {e}") from e
        found = packed.prune(folder, keep, args.unused * 86400 if "unused" in args else None)
    if args.json:
        print(json.dumps([asdict(entry) for entry in found], default=str))
        return 0
    for entry in found:
        used = datetime.fromtimestamp(entry.used_at).strftime("%Y-%m-%d %H:%M")
        print(f"{entry.key[:12]:12}  {spoken(entry.nbytes):>10}  {used}  {entry.formats:12}  {entry.model}{'' if entry.whole else '  (torn)'}")
    total = spoken(sum(entry.nbytes for entry in found))
    print(f"{len(found)} packed models, {total} in {packed.place(folder)}" if args.do == "list" else f"removed {len(found)}: {total}")
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    from hetero import doctor
    from hetero.options import state_folder

    return doctor.show(doctor.look(from_flags(args), state_folder()), args.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and turns what went wrong into one line and an exit code: the outer door."""
    args = parser().parse_args(argv)
    if "run" not in args:
        parser().print_help(sys.stderr)
        return 2
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:                    # the reader left (head, less): nothing more to say, also not at exit
        sys.stdout = None
        return 141
    except HeteroError as e:
        _trace(args)
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, (BadOption, BadRequest)) else 1
    except Exception as e:  # noqa: BLE001  the outer door: a fault of ours is one line too, with its trace on request
        _trace(args)
        print(f"error: {type(e).__name__}: {e}\n\nhint: this is a fault in hetero; --debug shows where", file=sys.stderr)
        return 1


def _trace(args: argparse.Namespace) -> None:
    if "debug" in args:
        traceback.print_exc()
