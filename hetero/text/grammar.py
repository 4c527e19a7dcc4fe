"""What an answer must look like, as masks over the vocabulary: JSON schema, regular expression, choice, Lark grammar; knows no engine.

Every constraint is compiled in another process first, with limits of time and memory: what cannot be enforced is refused before generation, and a
mask that fails later allows nothing, so that the request ends with an error and never with text that nobody checked. White space between JSON
tokens is bounded. Grammars are llguidance's.
"""

import json
import resource
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import llguidance
import numpy as np

from hetero.errors import BadRequest
from hetero.request import Mask
from hetero.text.apart import Apart, Late
from hetero.text.tokenizer import Tokenizer, free_mark

MAX_CHARS, MAX_DEPTH, MAX_CHOICES = 256_000, 64, 4096
SPACE = r"[ \n]{0,2}"


def depth(value: Any, left: int = MAX_DEPTH, param: str = "response_format") -> None:
    if left == 0:
        raise BadRequest(f"the schema nests deeper than {MAX_DEPTH}", "flatten it, or use $ref", param)
    for v in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        depth(v, left - 1, param)


def from_schema(schema: Any, param: str = "response_format") -> str:
    """The grammar of JSON that validates. Raises BadRequest for what is no schema, too large or names something elsewhere."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise BadRequest(f"a JSON schema is an object, not {json.dumps(schema)[:80]}", "send an object", param)
    depth(schema, param=param)
    text = json.dumps(schema)
    _short(text, param)
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": SPACE})


def any_object(param: str = "response_format") -> str:
    """The grammar of any JSON object."""
    return from_schema({"type": "object"}, param)


def from_regex(pattern: str, param: str = "regex") -> str:
    _short(pattern, param)
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def from_choice(choices: Sequence[str], param: str = "choice") -> str:
    """One of these texts, exactly."""
    if not choices or not all(isinstance(c, str) and c for c in choices) or len(choices) > MAX_CHOICES:
        raise BadRequest(f"choice must be 1 to {MAX_CHOICES} texts that are not empty", param=param)
    return from_lark("start: " + " | ".join(map(quote, choices)), param)


def from_lark(text: str, param: str = "grammar") -> str:
    _short(text, param)
    return llguidance.LLMatcher.grammar_from_lark(text)


def _short(text: str, param: str) -> None:
    if len(text) > MAX_CHARS:
        raise BadRequest(f"{param} has {len(text)} characters, but at most {MAX_CHARS} are taken", "make it smaller", param)


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Words:
    """The vocabulary in the form that llguidance asks for: exact bytes; special tokens, and no others, are control tokens."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.ends = sorted(i for i in tokenizer.ends() if i < size)
        self.eos_token_id, self.bos_token_id = (self.ends or [0])[0], tokenizer.bos
        self.special_token_ids = sorted(i for i in tokenizer.specials | tokenizer.ends() if i < size)
        self.tokens = [tokenizer.bytes_of(i) for i in range(size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """The ids that the tokenizer itself would give (llguidance asks for text that the grammar forces)."""
        mark = free_mark([text])
        return self._tokenizer.encode_marked(self._tokenizer.shield(text, mark, loose=False), mark)

    def load(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(self, n_vocab=len(self.tokens), eos_token=self.ends or None)  # type: ignore[arg-type]


class Vocabulary:
    """A tokenizer as llguidance knows it; made once per model, at its first use. size: how many ids the engine knows."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.tokenizer, self.size = tokenizer, size

    @cached_property
    def words(self) -> _Words:
        return _Words(self.tokenizer, self.size)

    @cached_property
    def known(self) -> llguidance.LLTokenizer:
        return self.words.load()

    def mask(self, grammar: str, param: str = "response_format") -> "GrammarMask":
        """The mask of a grammar at its start. BadRequest when it does not compile; check it with `Checker` first, for this is not bounded in time."""
        matcher = llguidance.LLMatcher(self.known, grammar, log_level=0)
        _raise(matcher.get_error(), param)
        return GrammarMask(matcher, -(-self.size // 32))


class GrammarMask:
    """A `request.Mask` of one grammar. When the grammar fails at run time nothing is allowed any more."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int) -> None:
        self._matcher, self._words = matcher, words

    def allowed(self) -> Sequence[int]:
        if self._matcher.is_error():
            return np.zeros(self._words, np.uint32)  # type: ignore[return-value]
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[:self._words]
        return mask if not self._matcher.is_error() else np.zeros(self._words, np.uint32)  # type: ignore[return-value]

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    def fork(self) -> "GrammarMask":
        return GrammarMask(self._matcher.deep_copy(), self._words)


class AfterReasoning:
    """Everything but an end is allowed until the closing tag of reasoning; then `inner` holds.

    may_open: reasoning has not begun: `inner` holds from the start, unless this token comes first.
    """

    def __init__(self, inner: Mask, tokenizer: Tokenizer, size: int, close: str, may_open: int | None = None) -> None:
        self._inner, self._tokenizer, self._close, self._tail, self._done = inner, tokenizer, close.encode(), b"", False
        self._open = may_open
        bits = np.ones(-(-size // 32) * 32, np.uint8)
        bits[sorted(i for i in tokenizer.ends() if i < size)] = 0
        self._free = np.packbits(bits, bitorder="little").view(np.uint32)

    def allowed(self) -> Sequence[int]:
        if self._open is not None:
            mask = np.array(self._inner.allowed(), np.uint32)
            mask[self._open // 32] |= np.uint32(1 << self._open % 32)
            return mask  # type: ignore[return-value]
        return self._inner.allowed() if self._done else self._free  # type: ignore[return-value]

    def accept(self, token: int) -> None:
        opened, self._open = self._open, None
        if opened is not None and token != opened:
            self._done = True
        if self._done:
            self._inner.accept(token)
            return
        self._tail = (self._tail + self._tokenizer.bytes_of(token))[-256:]
        self._done = self._tail.rstrip().endswith(self._close)

    def fork(self) -> "AfterReasoning":
        twin = AfterReasoning.__new__(AfterReasoning)
        twin.__dict__.update(self.__dict__)
        twin._inner = self._inner.fork()
        return twin


def _raise(error: str, param: str) -> None:
    if error:
        words = " ".join(line.strip() for line in error.splitlines() if line.strip())
        raise BadRequest(f"{param} cannot be enforced: {words[:300]}", "the keywords that can be: llguidance, docs/json_schema.md", param)


def _compiler(words: _Words, memory_bytes: int) -> Callable[[str], str]:
    """In the other process: what compiles a grammar and says what is wrong with it."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    known = words.load()

    def error(grammar: str) -> str:
        matcher = llguidance.LLMatcher(known, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error()
    return error


class Checker:
    """Compiles grammars in a process that can be ended: a grammar that takes longer than `seconds` or more than `memory_bytes` is refused."""

    def __init__(self, vocabulary: Vocabulary, seconds: float = 5.0, memory_bytes: int = 4 << 30) -> None:
        self.apart, self._memory = Apart(_compiler, lambda: (vocabulary.words, memory_bytes), seconds), memory_bytes

    def check(self, grammar: str, param: str = "response_format") -> None:
        """Raises BadRequest naming what cannot be enforced. May be called from any thread; one at a time is compiled."""
        try:
            error = self.apart.ask(grammar)
        except Late:
            most = f"{self.apart.seconds:g} s or {self._memory >> 30} GiB"
            raise BadRequest(f"{param} takes more than {most} to compile", "make it smaller", param) from None
        _raise(error, param)

    def close(self) -> None:
        """Ends the process; the next check starts another."""
        self.apart.close()
