"""hetero: run mixture-of-experts models far larger than the graphics card. Public names only."""

from typing import TYPE_CHECKING, Any

from hetero.errors import (
    BadCheckpoint,
    BadOption,
    BadRequest,
    ContextExceeded,
    DoesNotFit,
    DownloadFailed,
    EngineFailed,
    HeteroError,
    NotFinite,
    NotWritable,
    UnsupportedModel,
    UnusableHardware,
)
from hetero.request import Sampling

if TYPE_CHECKING:
    from hetero.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "BadCheckpoint", "BadOption", "BadRequest", "ContextExceeded", "DoesNotFit", "DownloadFailed", "EngineFailed", "HeteroError",
           "NotFinite", "NotWritable", "Sampling", "UnsupportedModel", "UnusableHardware", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch, which `hetero --help` and whoever only wants the errors should not wait for."""
    if name == "LLM":
        from hetero.llm import LLM
        return LLM
    raise AttributeError(f"module 'hetero' has no attribute {name!r}")
