"""What the engine's owner and whoever prepares requests tell each other, as plain data that crosses pipes and machines; knows no wire format."""

from dataclasses import dataclass, field

from hetero.engine.scheduler import Limits
from hetero.request import Sampling


@dataclass(frozen=True)
class Job:
    """A request as it crosses the pipe: plain data. `grammar`: llguidance text, checked before; `after`: it holds after this text (reasoning's end);
    `may_open`: or from the start, unless this token comes first."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    grammar: str | None = None
    after: str = ""
    may_open: int | None = None
    cache_prompt: bool = True
    priority: int = 0
    progress: bool = False


@dataclass(frozen=True)
class Info:
    """What the server must know of the model: where its tokenizer lies, what it may be asked, and what its authors recommend."""

    name: str
    folder: str
    vocab: int
    context: int
    sampling: Sampling = field(default_factory=Sampling)
    sampling_sources: dict[str, str] = field(default_factory=dict)
    options: tuple[tuple[str, str, str], ...] = ()
    limits: Limits = field(default_factory=Limits)
    files: dict[str, str] = field(default_factory=dict)     # small files of a model that is one container (GGUF), by name
