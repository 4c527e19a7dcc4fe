"""Text to token ids and back, byte-exact, from the files beside a checkpoint; knows no template, no model and no request.

Every id has exact bytes (`bytes_of`), so that text can be built token by token and equals the text built at once. The byte alphabet is GPT-2's
(`bytes_to_unicode` in openai/gpt-2 encoder.py); `▁` and `<0xNN>` are sentencepiece's.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from hetero.errors import BadCheckpoint

CONVERTIBLE = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "spiece.model")

LONG = 10_000                            # characters that are tokenized in a few milliseconds


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that stand for bytes in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


ALPHABET = byte_alphabet()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no file; BadCheckpoint names the file when it is not one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise BadCheckpoint(f"{path}: not JSON ({e})", "the download may be incomplete: fetch this file again") from e
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path}: a JSON object is expected, found {type(value).__name__}", "fetch this file again")
    return value


def spelling(value: object) -> str | None:
    """A special token as tokenizer_config.json spells it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def ids_of(value: object) -> list[int]:
    """`eos_token_id` as configs spell it: an int, a list of ints, absent or null."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _convert(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer that exists only as sentencepiece, tekken, tiktoken or vocab + merges files, converted by transformers without remote code."""
    if not any((folder / name).is_file() for name in CONVERTIBLE):
        raise BadCheckpoint(f"{folder}: no tokenizer.json and no {', '.join(CONVERTIBLE)}", "copy the tokenizer files of the model into this folder")
    if config.get("auto_map"):
        raise BadCheckpoint(f"{folder / 'tokenizer_config.json'}: the tokenizer is Python code from the hub (auto_map), which is never run",
                            "put a tokenizer.json into the folder; most such models have a converted one in a community copy")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        made = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as e:
        raise BadCheckpoint(f"{folder}: the tokenizer files cannot be read ({str(e).splitlines()[0]})", "put a tokenizer.json into the folder") from e
    if not isinstance(made, PreTrainedTokenizerFast):
        raise BadCheckpoint(f"{folder}: {type(made).__name__} has no tokenizer.json form", "put a tokenizer.json into the folder")
    return made.backend_tokenizer


def _load(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert(folder, config)
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as e:  # the tokenizers library raises bare Exception for every malformed file
        raise BadCheckpoint(f"{path}: not a tokenizer ({e})", "the download may be incomplete: fetch this file again") from e


def _declare(backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Tokens that only tokenizer_config.json declares, at the ids that it gives them."""
    have = backend.get_added_tokens_decoder()
    for key, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        content, special = spelling(entry), bool(entry.get("special"))
        known = have.get(int(key))
        if content is None or (known is not None and known.special == special):
            continue
        token = tokenizers.AddedToken(content, special=special, lstrip=bool(entry.get("lstrip")), rstrip=bool(entry.get("rstrip")),
                                      single_word=bool(entry.get("single_word")), normalized=bool(entry.get("normalized", not special)))
        (backend.add_special_tokens if special else backend.add_tokens)([token])
        if backend.token_to_id(content) != int(key):
            raise BadCheckpoint(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder[{key}] is {content!r}, "
                                f"but tokenizer.json gives it id {backend.token_to_id(content)}", "the two files belong to different models")


def _parts(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's steps, flat."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "None"}
    return state.get("decoders", [state])


class Tokenizer:
    """A vocabulary with exact bytes for every id, and the ids that end an answer with where each was found.

    `eos` maps id -> the files or places that name it. `bos` is what a raw prompt starts with, None for none. `specials` are hidden from text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], eos: dict[int, list[str]], name: str = "tokenizer.json") -> None:
        self.backend, self.config, self.eos, self.name = backend, config, eos, name
        backend.no_padding()
        backend.no_truncation()
        parts = _parts(backend.decoder)
        kinds = {p["type"] for p in parts}
        if unknown := kinds & {"WordPiece", "CTC", "BPEDecoder"}:
            raise BadCheckpoint(f"{name}: decoder {unknown.pop()} is not understood", "supported: ByteLevel, Metaspace, Replace, ByteFallback")
        self.byte_level, self.fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self.spaced = "Metaspace" in kinds or any(p["type"] == "Replace" and p["pattern"].get("String") == "▁" for p in parts)
        # decoders that drop the space which the encoder put before the first word
        self.strips = any((p["type"] == "Strip" and p["content"] == " " and p["start"] > 0)
                          or (p["type"] == "Metaspace" and p.get("prepend_scheme", "always") != "never") for p in parts)
        added = backend.get_added_tokens_decoder()
        self.added = {i: t.content for i, t in added.items()}
        self.specials = frozenset(i for i, t in added.items() if t.special)
        self.size = max(backend.get_vocab_size(with_added_tokens=True), max(self.added, default=-1) + 1)
        self.named = {k: s for k, v in config.items() if k.endswith("_token") and (s := spelling(v)) is not None}
        self.bos = self._bos()
        self._bytes: dict[int, bytes] = {}
        marks = [t.content for i, t in added.items() if len(t.content) > 1 and i in self.specials]
        loose = [t.content for i, t in added.items() if i not in self.specials and re.fullmatch(r"[<\[].*\w.*[>\]]", t.content)]
        self._control = {False: _either(marks), True: _either(marks + loose)}

    def _bos(self) -> int | None:
        """What tokenizer_config.json says (`add_bos_token`), else what tokenizer.json's post-processor does."""
        asked, named = self.config.get("add_bos_token"), self.named.get("bos_token")
        if isinstance(asked, bool):
            return self.id_of(named) if asked and named else None
        first = self.backend.encode("a", add_special_tokens=True).ids[:1]
        return first[0] if first and first != self.backend.encode("a", add_special_tokens=False).ids[:1] and first[0] in self.specials else None

    def id_of(self, text: str) -> int | None:
        """The id of one token by its spelling."""
        return self.backend.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; spellings of control tokens become control tokens; nothing is added."""
        if len(text) < LONG:
            return self.backend.encode(text, add_special_tokens=False).ids
        return self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids     # the same ids, and other threads go on meanwhile

    def encode_content(self, text: str) -> list[int]:
        """Ids of text from outside: spellings of control tokens stay ordinary text."""
        mark = free_mark([text])
        return self.encode_marked(self.shield(text, mark, loose=True), mark)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: as `encode`, with BOS in front when the model wants one and the text does not spell it."""
        ids = self.encode(text)
        return ids if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]

    def shield(self, text: str, mark: str, loose: bool) -> str:
        """`text` with `mark` inside every spelling of a control token (`loose`: of markers like <tool_call> too), for `encode_marked`."""
        control = self._control[loose]
        while control.search(text):
            text = control.sub(lambda m: m[0][0] + mark + m[0][1:], text)
        return text

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of a text in which `mark` cuts the spellings that must stay ordinary text."""
        return [i for piece in text.split(mark) if piece for i in self.encode(piece)]

    def bytes_of(self, token: int) -> bytes:
        """The exact bytes of one id, special tokens by their spelling; b"" for ids that the vocabulary does not have."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token].encode()
        text = self.backend.id_to_token(token) if 0 <= token < self.size else None
        if text is None:
            return b""
        if self.byte_level:
            values = [ALPHABET.get(c) for c in text]
            return text.encode() if None in values else bytes(v for v in values if v is not None)
        if self.fallback and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)):
            return bytes([int(byte[1], 16)])
        return (text.replace("▁", " ") if self.spaced else text).encode()

    def decode(self, ids: Sequence[int], specials: bool = False) -> str:
        """The text of ids; special tokens are left out unless `specials`; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(self.bytes_of(i) for i in ids if specials or i not in self.specials)
        return (data[1:] if self.strips and data[:1] == b" " else data).decode("utf-8", "replace")

    def ends(self) -> frozenset[int]:
        """Ids that end an answer."""
        return frozenset(self.eos)

    def add_end(self, token: int, place: str) -> None:
        """One more id that ends an answer, found at `place`."""
        self.eos.setdefault(token, []).append(place)


def _either(texts: Iterable[str]) -> re.Pattern[str]:
    ordered = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def free_mark(texts: Iterable[str]) -> str:
    """A private-use character that occurs in none of `texts`."""
    used = {c for t in texts for c in t if "\ue000" <= c <= "\uf8ff"}
    return next(c for c in map(chr, range(0xE000, 0xF900)) if c not in used)


def find_ends(backend: tokenizers.Tokenizer, config: dict[str, Any], model: dict[str, Any], generation: dict[str, Any]) -> dict[int, list[str]]:
    """The union of every source that names an end: tokenizer_config.json, config.json (also its text_config), generation_config.json."""
    ends: dict[int, list[str]] = {}
    named = spelling(config.get("eos_token"))
    inner = model.get("text_config")
    found = {"tokenizer_config.json": ids_of(backend.token_to_id(named)) if named else [],
             "config.json": ids_of(model.get("eos_token_id")) + (ids_of(inner.get("eos_token_id")) if isinstance(inner, dict) else []),
             "generation_config.json": ids_of(generation.get("eos_token_id"))}
    for place, ids in found.items():
        for i in ids:
            if place not in ends.setdefault(i, []):
                ends[i].append(place)
    return ends


def read(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. BadCheckpoint, one line, when there is none or it is damaged."""
    config = read_json(folder / "tokenizer_config.json")
    backend = _load(folder, config)
    _declare(backend, config, folder)
    ends = find_ends(backend, config, read_json(folder / "config.json"), read_json(folder / "generation_config.json"))
    return Tokenizer(backend, config, ends, str(folder / "tokenizer.json"))


def from_json(text: str, config: dict[str, Any], model: dict[str, Any], generation: dict[str, Any], name: str) -> Tokenizer:
    """A tokenizer from the text of a tokenizer.json that lies in no file (GGUF metadata); `name` is the place named in errors."""
    backend = tokenizers.Tokenizer.from_str(text)
    return Tokenizer(backend, config, find_ends(backend, config, model, generation), name)
