"""Talks on a terminal: a conversation with commands, or one answer for a prompt or piped text; knows of the model only how it streams an answer.

Answers go to stdout, everything else to stderr. Ctrl-C ends the answer that is being written, at the prompt only the line; Ctrl-D leaves.
"""

import json
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TextIO

from hetero.errors import BadRequest, HeteroError
from hetero.request import Sampling
from hetero.text.reply import Chunk, Timings

HELP = """\
/system [TEXT]   show or set the system message        /reset         forget the conversation
/regen           answer the last question again        /stats         tokens and speed so far
/set NAME VALUE  temperature, top_p, seed, ...         /save FILE     keep the conversation
/help            this list                             /load FILE     take up a kept one
/exit            leave (or Ctrl-D)                     Alt+Enter      a new line in the message
Ctrl-C stops the answer. A line that ends in \\ goes on; \"\"\" opens and closes a block."""
COMMANDS = ("system", "reset", "regen", "stats", "set", "save", "load", "help", "exit", "quit")
SETTABLE = {f.name: f.type for f in fields(Sampling) if f.name not in ("logit_bias", "stop", "stop_ids", "n", "logprobs", "prompt_logprobs")}


class Talker(Protocol):
    """What a chat needs of a model. `hetero.LLM` is one."""

    @property
    def name(self) -> str: ...

    @property
    def sampling(self) -> Sampling:
        """What holds for requests that say nothing."""
        ...

    def stream(self, prompt: Any, sampling: Sampling | None = None) -> Generator[Chunk, None, None]:
        """Chunks of an answer to a conversation (a list of messages); closing the iterator ends the request."""
        ...


@dataclass
class Talk:
    """A conversation and how its answers are chosen."""

    sampling: Sampling
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[Timings] = field(default_factory=list)

    def all(self) -> list[dict[str, str]]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages

    def save(self, path: Path) -> None:
        """Writes the conversation as JSON, whole or not at all."""
        part = path.with_name(path.name + ".part")
        try:
            part.write_text(json.dumps({"messages": self.all()}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as e:
            raise BadRequest(f"{path}: {e.strerror}", "name a file in a folder that can be written") from e

    def load(self, path: Path) -> None:
        """Takes up a conversation that `save` wrote."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in kept["messages"]]
        except OSError as e:
            raise BadRequest(f"{path}: {e.strerror}", "name a file that /save wrote") from e
        except (ValueError, TypeError, KeyError) as e:
            raise BadRequest(f"{path}: not a kept conversation ({e})", "name a file that /save wrote") from e
        first = messages[:1] if messages and messages[0]["role"] == "system" else []
        self.system, self.messages = first[0]["content"] if first else "", messages[len(first):]


def safe(text: str) -> str:
    """Text that cannot move a terminal's cursor, set its title or paste into it: control characters but newline and tab become U+FFFD."""
    return "".join("\ufffd" if (c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f" else c for c in text)


def speed(t: Timings) -> str:
    """One line about one answer."""
    reused = f", {t.cached_tokens} reused" if t.cached_tokens else ""
    return f"[{t.tokens} tokens, {t.decode_tok_s:.1f} tok/s, first after {t.ttft_s:.2f} s; prompt {t.prompt_tokens} tokens{reused}]"


class Stop:
    """While it is open, the first Ctrl-C asks for an end (`asked`) and the second one insists (KeyboardInterrupt)."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Stop":
        self._before = signal.signal(signal.SIGINT, self._signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def answer(model: Talker, talk: Talk, out: TextIO, stop: Stop, clean: Callable[[str], str] = str) -> tuple[str, Timings, str]:
    """Streams one answer to `out` until `stop` is asked: its text, its timings and why it ended (stop | length | abort | error: …)."""
    text, timings, finish = "", Timings(), "abort"
    with closing(model.stream(talk.all(), talk.sampling)) as chunks:
        for chunk in chunks:
            if stop.asked:
                break
            out.write(clean(chunk.text))
            out.flush()
            text, timings = text + chunk.text, chunk.timings
            if chunk.finish:
                finish = f"error: {chunk.error}" if chunk.finish == "error" else chunk.finish
    return text, timings, finish


def once(model: Talker, talk: Talk, prompt: str) -> int:
    """One answer on stdout; 0, or 1 when the engine could not finish it, 130 when it was stopped."""
    talk.messages.append({"role": "user", "content": prompt})
    with Stop() as stop:
        text, timings, finish = answer(model, talk, sys.stdout, stop)
    if not text.endswith("\n"):
        print(flush=True)
    say(speed(timings))
    if finish.startswith("error"):
        say(finish)
    return {"stop": 0, "length": 0, "abort": 130}.get(finish, 1)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Console:
    """The interactive conversation. `ask` reads one message, Ctrl-C too; it raises EOFError at the end, KeyboardInterrupt for a line given up."""

    def __init__(self, model: Talker, talk: Talk, ask: Callable[[], str]) -> None:
        self.model, self.talk, self.ask, self.stop = model, talk, ask, Stop()

    def run(self) -> int:
        say("Type a message; /help lists the commands, Ctrl-D leaves.")
        with self.stop:                     # the whole time: also just before an answer and just after it Ctrl-C must not leave the program
            while self.turn():
                pass
        return 0

    def turn(self) -> bool:
        """Reads a message and answers it; False leaves."""
        self.stop.asked = False
        try:
            line = self.read().strip()
        except KeyboardInterrupt:
            say("(Ctrl-D leaves)")
            return True
        except EOFError:
            return False
        try:
            if line.startswith("/"):
                return not self.command(*line[1:].split(maxsplit=1))
            if line:
                self.respond(line)
        except HeteroError as e:
            say(f"error: {e}")
        return True

    def read(self) -> str:
        """A message: one input, lines that end in a backslash joined to the next, or a block between triple quotes."""
        text = self.ask()
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self.ask()
        if text.lstrip().startswith('\"\"\"'):
            text = text.lstrip()[3:]
            while '\"\"\"' not in text:
                text += "\n" + self.ask()
            text = text[: text.index('\"\"\"')]
        return text

    def respond(self, line: str) -> None:
        """Answers a message. A message that is refused leaves the conversation as it was."""
        self.talk.messages.append({"role": "user", "content": line})
        try:
            self.reply()
        except BaseException:
            del self.talk.messages[-1]
            raise

    def reply(self) -> None:
        text, timings, finish = answer(self.model, self.talk, sys.stdout, self.stop, safe)
        print(flush=True)
        self.talk.answers.append(timings)
        say(speed(timings) + {"stop": "", "abort": " stopped", "length": " cut: the limit of tokens is reached"}.get(finish, f" {finish}"))
        self.talk.messages.append({"role": "assistant", "content": text})

    def command(self, name: str = "", rest: str = "") -> bool:
        """Does one command; True leaves."""
        talk = self.talk
        if name == "system":
            talk.system = rest or talk.system
            say(f"system: {talk.system or '(none)'}")
        elif name == "reset":
            talk.messages.clear()
            say("forgotten")
        elif name == "regen":
            self.regenerate()
        elif name == "stats":
            self.stats()
        elif name == "set":
            self.set(*rest.split(maxsplit=1))
        elif name in ("save", "load"):
            if not rest:
                raise BadRequest(f"/{name} needs a file", f"/{name} talk.json")
            path = Path(rest).expanduser()
            (talk.save if name == "save" else talk.load)(path)
            say(f"{'kept in' if name == 'save' else 'taken up from'} {path}: {len(talk.messages)} messages")
        elif name == "help":
            say(HELP)
        elif name in ("exit", "quit"):
            return True
        else:
            near = get_close_matches(name, COMMANDS, 1)
            raise BadRequest(f"unknown command /{name}", f"nearest: /{near[0]}" if near else "/help lists them")
        return False

    def regenerate(self) -> None:
        """Drops the last answer and makes another; a seed that was set moves on by one, so that it can differ."""
        talk = self.talk
        asked = max((i for i, m in enumerate(talk.messages) if m["role"] == "user"), default=None)
        if asked is None:
            raise BadRequest("nothing to answer again", "ask something first")
        del talk.messages[asked + 1:]
        if talk.sampling.seed is not None:
            talk.sampling = replace(talk.sampling, seed=talk.sampling.seed + 1)
        self.reply()

    def stats(self) -> None:
        done = [t for t in self.talk.answers if t.tokens]
        made, spent = sum(t.tokens - 1 for t in done), sum(t.total_s - t.ttft_s for t in done)
        say(f"{self.model.name}: {len(done)} answers, {sum(t.tokens for t in done)} tokens, {made / spent if spent else 0:.1f} tok/s; "
            f"context now {done[-1].prompt_tokens + done[-1].tokens if done else 0} tokens")

    def set(self, name: str = "", value: str = "") -> None:
        """Changes one value of sampling for what follows."""
        if name in SETTABLE and value:
            self.talk.sampling = replace(self.talk.sampling, **{name: read_value(name, value)})
        elif name and name not in SETTABLE:
            near = get_close_matches(name, SETTABLE, 1)
            raise BadRequest(f"/set knows no {name!r}", f"nearest: {near[0]}" if near else f"known: {', '.join(SETTABLE)}")
        say(", ".join(f"{n}={getattr(self.talk.sampling, n)}" for n in SETTABLE if not name or n == name))


def read_value(name: str, text: str) -> Any:
    """A sampling value from what a user typed. BadRequest names what it cannot be."""
    kind = str(SETTABLE[name])
    if text.lower() in ("none", "off") and "None" in kind:
        return None
    try:
        if "bool" in kind:
            return {"on": True, "true": True, "off": False, "false": False}[text.lower()]
        return float(text) if "float" in kind else int(text)
    except (ValueError, KeyError):
        raise BadRequest(f"{name} cannot be {text!r}", f"{name} is a {'number' if 'bool' not in kind else 'switch: on or off'}", name) from None


def terminal(history: Path) -> Callable[[], str]:
    """Reads messages with line editing, a history kept in a file where that can be written, and Alt+Enter for a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    try:
        history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        history.touch(mode=0o600)
        kept: FileHistory | InMemoryHistory = FileHistory(str(history))
    except OSError as e:
        say(f"note: no history is kept ({history}: {e.strerror})")
        kept = InMemoryHistory()
    words = WordCompleter([f"/{c}" for c in COMMANDS], sentence=True)
    session: PromptSession[str] = PromptSession("> ", history=kept, key_bindings=keys, completer=words, complete_while_typing=False)
    return lambda: session.prompt(handle_sigint=False)     # Ctrl-C is a key here; a signal is for the answer: the editor, once left, fails on one
