"""Every error a user can meet, as one tree; knows no other file of the project.

HeteroError                    something the user can act on: one line, then `hint: …`
├── BadOption                  a flag, variable, TOML key or value that cannot be meant
├── UnsupportedModel           a config we do not understand: key, value, what is supported
├── BadCheckpoint              files missing, cut, contradictory or hostile: file, tensor, byte range
│   └── DownloadFailed         a hub name that could not be fetched
├── DoesNotFit                 the plan exceeds this machine: the shortfall
├── NotWritable                an output file that cannot be written: full disk, read-only
├── UnusableHardware           a device or instruction set that was asked for and cannot be used
├── BadRequest                 one request's fault (`param` names the field); the others go on
│   └── ContextExceeded        prompt longer than the context
└── EngineFailed               the engine cannot go on (`layer` and cause); a handoff that timed out, a lost team
    └── NotFinite              NaN or infinity in the logits of one request: that request ends, the others go on

Asserts are for our own bugs; these are for the user's world.
"""


class HeteroError(Exception):
    """One line that names what and where (`message`), and what to do about it (`hint`)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class BadOption(HeteroError):
    """A flag, environment variable, TOML key or value that cannot be meant."""


class UnsupportedModel(HeteroError):
    """A configuration that we would run wrongly, refused by key and value."""


class BadCheckpoint(HeteroError):
    """Files that are missing, cut, contradictory or hostile."""


class DownloadFailed(BadCheckpoint):
    """A hub name that could not be fetched."""


class DoesNotFit(HeteroError):
    """The plan needs more than this machine has."""


class NotWritable(HeteroError):
    """An output file that cannot be written."""


class UnusableHardware(HeteroError):
    """A device or instruction set that was asked for and cannot be used."""


class BadRequest(HeteroError):
    """One request's fault; `param` is the field that is wrong."""

    def __init__(self, message: str, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint)
        self.param = param


class ContextExceeded(BadRequest):
    """The prompt does not fit the context."""


class EngineFailed(HeteroError):
    """The engine cannot finish a step; `layer` is where, when that is known."""

    def __init__(self, message: str, hint: str = "", layer: int | None = None) -> None:
        super().__init__(message, hint)
        self.layer = layer


class NotFinite(EngineFailed):
    """NaN or infinity in the logits of one request."""
