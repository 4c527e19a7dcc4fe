"""What a request is, as records without tensors: sampling, the request, its outputs, the two protocols that text implements; knows no model.

The random stream is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11), keyed by the seed and counted by
(token index, draw), so a draw never depends on neighbours, chunks or the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

_M0, _M1, _W0, _W1, _32 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Four uint32 of the Philox 4x32-10 block at `counter` under `key`."""
    (k0, k1), (a, b, c, d) = key, counter
    for _ in range(10):
        p, q = _M0 * a, _M1 * c
        a, b, c, d = (q >> 32) ^ b ^ k0, q & _32, (p >> 32) ^ d ^ k1, p & _32
        k0, k1 = (k0 + _W0) & _32, (k1 + _W1) & _32
    return a, b, c, d


def uniform(seed: int, index: int, draw: int = 0) -> float:
    """A float64 in [0, 1) for token `index` of the sequence seeded by `seed` (any 64-bit integer)."""
    seed &= 0xFFFFFFFFFFFFFFFF
    a, b, _, _ = philox((seed & _32, seed >> 32), (index & _32, index >> 32, draw, 0))
    return ((a >> 5) * 67108864.0 + (b >> 6)) / 9007199254740992.0


@dataclass(frozen=True)
class Sampling:
    """How one request's tokens are chosen. temperature 0 is greedy; None means "not set"; limits are inclusive.

    Penalties follow their usual definitions: `repetition_penalty` divides positive and multiplies negative logits of tokens already in prompt or
    output (CTRL, Keskar et al. 2019); presence and frequency penalties subtract once and per occurrence, counted over the output (OpenAI API).
    """

    temperature: float = 1.0
    top_k: int = 0                       # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None              # None: the engine draws one and reports it
    max_tokens: int | None = None        # None: until the context is full
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None          # how many alternatives per token; 0: only the chosen one
    prompt_logprobs: int | None = None


class Mask(Protocol):
    """Which tokens may come next. The engine asks before each token and tells what was chosen; it knows no grammar."""

    def allowed(self) -> Sequence[int]:
        """The vocabulary as a bit mask: ceil(V / 32) words of uint32, bit t % 32 of word t // 32 set when token t may come."""
        ...

    def accept(self, token: int) -> None: ...

    def fork(self) -> "Mask":
        """An independent copy, for n > 1."""
        ...


class Watcher(Protocol):
    """Sees each new token of one sequence, in order, and may end it. The engine knows no text."""

    def see(self, token: int) -> bool:
        """True when the sequence ends here (finish reason "stop")."""
        ...

    def fork(self) -> "Watcher":
        """An independent copy, for n > 1."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt in token ids and what to do with it. `id` is the caller's and unique among the running."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0                    # higher runs first; equal: first come, first served
    mask: Mask | None = None
    watcher: Watcher | None = None
    cache_prompt: bool = True
    progress: bool = False               # an output for each chunk of the prompt


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of one token, and of the most likely ones at that place, best first. Always finite (floor -1e4)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step brought one sequence. `finish` is None while it goes on, else stop | length | abort | error."""

    id: str
    index: int                           # which of n
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: str | None = None
    error: str | None = None             # one line, when finish is "error"
    cached_tokens: int = 0
    cache_miss: str | None = None        # why no more of the prompt was reused
    prompt_tokens: int = 0
    seed: int = 0
    read_tokens: int = 0                 # above 0: no token yet, so much of the prompt is read (`Request.progress`)
