"""`hetero batch run` and `hetero batch check`: their flags, and what they mean; imports nothing heavy before it runs."""

import argparse
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.errors import BadOption
from hetero.options import Options, add_flags, find_config, from_flags, read, read_config

if TYPE_CHECKING:
    from hetero.llm import LLM

CONFIG = "batch"                         # what is not set otherwise is taken from this installed file
EXAMPLES = """examples:
  hetero batch check in.jsonl --model ./folder                validate, load nothing
  hetero batch run in.jsonl -o out.jsonl --model ./folder     answers in out.jsonl, failures in out.errors.jsonl
  hetero batch run in.jsonl -o out.jsonl --model ./folder --resume
exit codes: 0 every row answered, 3 finished with failed rows, 130 stopped (--resume goes on)"""


def add(to: argparse.ArgumentParser, shared: argparse.ArgumentParser, add_sampling: Callable[[argparse.ArgumentParser], None],
        names: Iterable[str], load: Callable[[str | None, Options], "LLM"]) -> None:
    """shared: flags that every command has; names: the flags that `add_sampling` adds; load: opens a model and shows how far that is."""
    to.formatter_class, to.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES
    commands = to.add_subparsers(title="commands", metavar="run|check", required=True)
    run = commands.add_parser("run", help="answer every row of a file", parents=[shared])
    check = commands.add_parser("check", help="tell what is wrong with a file, without loading the model", parents=[shared])
    for each in (run, check):
        each.add_argument("input", metavar="IN", help="JSONL, plain or gzip; - is stdin: OpenAI batch lines, or {\"prompt\": …} or {\"messages\": …}")
        each.add_argument("--model", metavar="MODEL", help="folder, GGUF file or hub name; not given: the embedded model")
        each.add_argument("--served-model-name", default="", metavar="NAME", help="what rows call the model")
        each.add_argument("--tool-format", default="auto", metavar="NAME", help="how the model writes reasoning and calls; auto: its template tells")
        each.add_argument("--chat-template", type=Path, metavar="FILE", help="jinja file in place of the model's own template")
    run.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="answers, one line a row, as in OpenAI's batches")
    run.add_argument("--errors", type=Path, metavar="FILE", help="failed rows [OUT's name with .errors.jsonl]")
    run.add_argument("--order", choices=("completion", "input"), default="completion", help="order of the answers [completion]")
    run.add_argument("--on-error", choices=("row", "abort"), default="row", help="bad rows: into the errors file, or run nothing [row]")
    run.add_argument("--resume", action="store_true", help="go on with an output that was begun")
    run.add_argument("--retry-errors", action="store_true", help="with --resume: run failed rows again")
    run.add_argument("--progress", choices=("auto", "bar", "lines", "json", "off"), default="auto", help="on stderr [auto]")
    run.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help="spread over a Ray cluster (pip install 'hetero-moe[ray]')")
    check.add_argument("--json", action="store_true", help="bad lines and the sum as JSON, one object a line")
    for each, body in ((run, partial(run_batch, names=names, load=load)), (check, partial(run_check, names=names))):
        each.set_defaults(run=body)
        add_sampling(each)
        add_flags(each.add_argument_group("options of the engine"))


def options_of(args: argparse.Namespace) -> Options:
    """The user's options, and configs/batch.toml for the rest."""
    options, file = from_flags(args), find_config(CONFIG)
    for name, value in read_config(file).items():
        if options.source(name) == "default":
            options = options.with_values(f"configs/{file.name}", **{name: read(name, value, str(file))})
    return options


def wanted_of(args: argparse.Namespace, names: Iterable[str]) -> Any:
    from hetero.batch.rows import Wanted

    given = {k: list(v) if k == "stop" else v for k, v in vars(args).items() if k in names or k in ("stop", "ignore_eos")}
    return Wanted(args.served_model_name, args.tool_format, args.chat_template, given)


def run_batch(args: argparse.Namespace, names: Iterable[str], load: Callable[[str | None, Options], "LLM"]) -> int:
    from hetero.batch.run import Task, alone, run

    options = options_of(args)
    if args.retry_errors and not args.resume:
        raise BadOption("--retry-errors needs --resume", "add --resume")
    task = Task(args.input, args.output, args.errors, args.order, args.on_error, args.resume, args.retry_errors, args.progress,
                wanted_of(args, names), options.seed)
    if args.ray is None:
        return run(task, args.model, options, lambda opening: alone(opening, load))
    try:
        from hetero.batch.spread import cluster
    except ImportError as e:
        raise BadOption(f"Ray is not installed ({e.name})", "pip install 'hetero-moe[ray]'") from e
    return run(task, args.model, options, lambda opening: cluster(opening, args.ray))


def run_check(args: argparse.Namespace, names: Iterable[str]) -> int:
    from hetero.batch.run import check
    from hetero.batch.survey import Fault

    def tell(fault: Fault) -> None:
        print(json.dumps(fault.record(), ensure_ascii=False) if args.json else fault.text(args.input))
    survey = check(args.input, args.model, options_of(args), wanted_of(args, names), tell)
    found = {"rows": survey.rows, "good": survey.rows - survey.bad, "bad": survey.bad, "prompt_tokens": survey.prompt_tokens}
    print(json.dumps(found) if args.json else f"{survey.rows:,} rows, {survey.bad:,} bad, {survey.prompt_tokens:,} prompt tokens")
    return 3 if survey.bad else 0
