"""The door: commands and their flags; knows which floor does what and does nothing itself.

Imports are inside functions, so that --help and --version answer at once. Exit codes: 0 done, 1 could not be done, 2 asked wrongly, 130 stopped.
"""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

from hetero import __version__
from hetero.errors import BadOption, BadRequest, HeteroError
from hetero.options import add_flags, from_flags

EXAMPLES = """examples:
  hetero doctor    what this machine is, and what stands in the way"""


def parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error came from")
    top = argparse.ArgumentParser("hetero", description="Run mixture-of-experts models far larger than the graphics card.", epilog=EXAMPLES,
                                  formatter_class=argparse.RawDescriptionHelpFormatter, parents=[shared])
    top.add_argument("--version", action="version", version=f"hetero {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=[shared])
        made.set_defaults(run=run)
        return made

    doctor = command("doctor", run_doctor, "tell what this machine is and what stands in the way")
    doctor.add_argument("--json", action="store_true")
    add_flags(doctor, ["cache_dir", "config"])
    return top


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
