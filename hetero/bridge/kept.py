"""What transformers' own cache of a model holds, counted by running the model on no memory; knows no weights and no number of a token."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NOWHERE = "hetero_nowhere"
WORDS = ("cache", "past_key_values", "cache_params")                  # what transformers' versions and classes call it
FEW, MORE = 4, 8


def count(module: Any, text: Any) -> tuple[int, int, bool]:
    """(numbers per token, numbers per sequence, whether that was found out): a model whose code needs real numbers is counted by its config's heads.
    A window counts as if it kept every token."""
    ALL_EXPERTS_FUNCTIONS.register(NOWHERE, lambda module, x, ids, weights: torch.empty_like(x))
    try:
        few, more = (held(module, tokens) for tokens in (FEW, MORE))
        each = (more - few) // (MORE - FEW)
        return each, max(0, few - FEW * each), True
    except (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        own = vars(text)
        heads = own.get("num_key_value_heads") or own.get("num_attention_heads") or 1
        dim = own.get("head_dim") or text.hidden_size // (own.get("num_attention_heads") or 1)
        return 2 * text.num_hidden_layers * (heads if isinstance(heads, int) else max(heads)) * dim, 0, False


def held(module: nn.Module, tokens: int) -> int:
    """Numbers in the cache after so many tokens."""
    empty = copy.deepcopy(module).to("meta")
    for m in empty.modules():
        if "is_concatenated" in vars(m):
            vars(m)["config"]._experts_implementation_internal = NOWHERE
    given = {"input_ids": torch.zeros(1, tokens, dtype=torch.long, device="meta"), "use_cache": True}
    if "position_ids" in inspect.signature(empty.forward).parameters:
        given["position_ids"] = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.no_grad():
        out = empty(**given)
    return sum(t.numel() for t in tensors(next(out[w] for w in WORDS if w in out), set()))


def tensors(kept: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor of a cache, once."""
    if id(kept) in seen or isinstance(kept, nn.Module):
        return
    seen.add(id(kept))
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, (list, tuple, set)):
        for v in kept:
            yield from tensors(v, seen)
    elif isinstance(kept, dict):
        for v in kept.values():
            yield from tensors(v, seen)
    elif type(kept).__module__.startswith("transformers.") and not isinstance(kept, (type, PreTrainedConfig)):
        yield from tensors(vars(kept), seen)
