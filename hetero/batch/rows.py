"""Input of a batch, line by line: JSONL plain or gzip, OpenAI batch lines and short rows; knows form alone, no model.

Source of the format: platform.openai.com/docs/guides/batch. A row's number (`turn`) counts lines that are not blank, from 0.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hetero.errors import BadRequest

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
URLS = (CHAT, COMPLETIONS, RESPONSES)
MAX_LINE_BYTES = 16 << 20                # the server's largest body
MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank. `data` None: it was longer than MAX_LINE_BYTES."""

    turn: int
    number: int                          # in the file, from 1
    data: bytes | None
    at: int = 0                          # its first byte


@dataclass(frozen=True, slots=True)
class Row:
    """What one line asks: the body of a request to `url`. `short`: a short row, which is continued until it ends, not for 16 tokens."""

    turn: int
    number: int
    id: str
    url: str
    body: dict[str, Any]
    short: bool = False


@dataclass(frozen=True)
class Wanted:
    """What a user says about all rows: the name that bodies use for the model, how it writes calls, and sampling where a row says nothing."""

    served: str = ""
    tool_format: str = "auto"
    chat_template: Path | None = None
    sampling: Mapping[str, Any] | None = None
    seed: int = 0
    created: int = 0                     # seconds since the epoch, the same for all answers of a batch


class Misread(BadRequest):
    """A line that is no row; `id` when at least that could be read."""

    id: str | None = None


@contextmanager
def open_input(path: Path) -> Iterator[IO[bytes]]:
    """Bytes of a file, decompressed when it is gzip by its first bytes."""
    try:
        file = path.open("rb")
    except OSError as e:
        raise BadRequest(f"{path}: {e.strerror}", "the input is a JSONL file, or - for stdin", "input") from e
    with file:
        if file.peek(2)[:2] != b"\x1f\x8b":
            yield file
            return
        with gzip.open(file, "rb") as unpacked:
            yield unpacked  # type: ignore[misc]


def read_lines(path: Path, digest: Any = None, at: int = 0, number: int = 0) -> Iterator[Line]:
    """Lines that are not blank; a byte order mark, CRLF and a missing last newline do no harm. digest: told every byte. at, number: where to begin,
    and how many lines are before. Raises BadRequest when the file cannot be read to its end."""
    turn = 0
    with open_input(path) as file:
        try:
            file.seek(at)
            while data := file.readline(MAX_LINE_BYTES + 1):
                start, number, at = at, number + 1, at + len(data)
                if digest is not None:
                    digest.update(data)
                long = len(data) > MAX_LINE_BYTES
                while long and not data.endswith(b"\n") and (data := file.readline(MAX_LINE_BYTES)):
                    at += len(data)
                    if digest is not None:
                        digest.update(data)
                if number == 1:
                    data = data.removeprefix(b"\xef\xbb\xbf")
                if long or (data := data.strip()):
                    yield Line(turn, number, None if long else data, start)
                    turn += 1
        except (OSError, EOFError, zlib.error) as e:
            raise BadRequest(f"{path}: cannot be read beyond line {number}: {e}", "a cut or damaged file? make it again", "input") from e


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def parse(line: Line) -> Row:
    """A line as a row. Raises Misread naming the field."""
    if line.data is None:
        raise Misread(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB", "make it shorter")
    try:
        found = json.loads(line.data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as e:
        raise Misread(f"not UTF-8 (byte {e.start})", "convert the file to UTF-8") from None
    except (ValueError, RecursionError) as e:
        raise Misread(f"not JSON: {str(e)[:120]}", "one JSON object a line") from None
    if not isinstance(found, dict):
        raise Misread(f"a JSON {type(found).__name__}, not an object", "one JSON object a line")
    openai = any(k in found for k in ("custom_id", "url", "body", "method"))
    name = "custom_id" if openai else "id"
    id = found.get(name)
    if id is None and not openai:
        id = f"row-{line.number}"
    if isinstance(id, int) and not openai and not isinstance(id, bool):
        id = str(id)
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ID_CHARS or not id.isprintable():
        raise Misread(f"{name} must be a text of 1 to {MAX_ID_CHARS} printable characters" + (", and is missing" if id is None else ""), "", name)
    try:
        return _batch_line(line, id, found) if openai else _short_row(line, id, found)
    except Misread as e:
        e.id = id
        raise


def _batch_line(line: Line, id: str, found: dict[str, Any]) -> Row:
    if found.get("method", "POST") != "POST":
        raise Misread(f"method is {str(found['method'])[:40]!r}, but must be POST", "", "method")
    url = found.get("url")
    if url not in URLS:
        raise Misread(f"url is {str(url)[:80]!r}" if url is not None else "url is missing", f"known: {', '.join(URLS)}", "url")
    body = found.get("body")
    if not isinstance(body, dict):
        raise Misread("body must be an object" + (", and is missing" if body is None else ""), "", "body")
    return Row(line.turn, line.number, id, url, _whole(body, "body."))


def _short_row(line: Line, id: str, found: dict[str, Any]) -> Row:
    body = {k: v for k, v in found.items() if k != "id"}
    if ("messages" in body) == ("prompt" in body):
        both = "both prompt and messages" if "prompt" in body else "neither custom_id, method, url and body, nor prompt or messages"
        raise Misread(f"the row has {both}", 'a batch line, {"prompt": …} or {"messages": …}')
    return Row(line.turn, line.number, id, CHAT if "messages" in body else COMPLETIONS, _whole(body, ""), True)


def _whole(body: dict[str, Any], prefix: str) -> dict[str, Any]:
    if body.get("stream"):
        raise Misread("stream is true, but a batch has whole answers", "leave stream out", f"{prefix}stream")
    return body


def key_of(id: str | None, number: int) -> bytes:
    """16 bytes that stand for a row: of its id, or of its line when no id could be read."""
    return hashlib.blake2b(id.encode("utf-8", "surrogatepass") if id is not None else b"\0line %d" % number, digest_size=16).digest()
