"""Checks every field of a request against the model and the engine's limits before anything else sees it; knows no tensor and no text."""

import math

from hetero.engine.scheduler import Limits
from hetero.errors import BadRequest, ContextExceeded
from hetero.request import Request


def _refuse(param: str, value: object, wanted: str) -> BadRequest:
    return BadRequest(f"{param} is {str(value)[:80]}, but must be {wanted}", f"change {param}", param)


def _whole(param: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refuse(param, value, f"a whole number from {low} to {high}")


def _number(param: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
        raise _refuse(param, value, f"a number from {low:g} to {high:g}")


def _ids(param: str, ids: tuple[int, ...], vocab: int) -> None:
    if all(type(t) is int for t in ids) and (not ids or (min(ids) >= 0 and max(ids) < vocab)):
        return
    wrong = next(t for t in ids if type(t) is not int or not 0 <= t < vocab)
    raise _refuse(param, repr(wrong), f"token ids from 0 to {vocab - 1} (the vocabulary has {vocab})")


def validate(request: Request, vocab: int, context: int, limits: Limits) -> None:
    """Raises BadRequest with `param`, or ContextExceeded."""
    s = request.sampling
    if not request.prompt:
        raise BadRequest("the prompt is empty", "give at least one token", "prompt")
    if len(request.prompt) >= context:
        raise ContextExceeded(f"the prompt has {len(request.prompt)} tokens, the context holds {context} with the answer",
                              "shorten the prompt, or start with a larger --ctx", "prompt")
    _ids("prompt", request.prompt, vocab)
    _whole("priority", request.priority, -(2**31), 2**31)
    _number("temperature", s.temperature, 0.0, 1e6)
    _whole("top_k", s.top_k, -1, 2**31)
    _number("top_p", s.top_p, 0.0, 1.0)
    _number("min_p", s.min_p, 0.0, 1.0)
    _number("repetition_penalty", s.repetition_penalty, 1e-3, 1e3)
    _number("presence_penalty", s.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", s.frequency_penalty, -2.0, 2.0)
    if len(s.logit_bias) > limits.max_bias:
        raise _refuse("logit_bias", f"{len(s.logit_bias)} entries", f"at most {limits.max_bias}")
    _ids("logit_bias", tuple(t for t, _ in s.logit_bias), vocab)
    for _, value in s.logit_bias:
        _number("logit_bias", value, -100.0, 100.0)
    if s.seed is not None:
        _whole("seed", s.seed, -(2**63), 2**64 - 1)
    if s.max_tokens is not None:
        _whole("max_tokens", s.max_tokens, 1, 2**31)
    _whole("min_tokens", s.min_tokens, 0, context if s.max_tokens is None else s.max_tokens)
    _ids("stop_ids", s.stop_ids, vocab)
    if not all(isinstance(text, str) and text for text in s.stop):
        raise _refuse("stop", s.stop, "texts that are not empty")
    _whole("n", s.n, 1, limits.max_n)
    for param, asked in (("logprobs", s.logprobs), ("prompt_logprobs", s.prompt_logprobs)):
        if asked is not None:
            _whole(param, asked, 0, limits.max_logprobs)
