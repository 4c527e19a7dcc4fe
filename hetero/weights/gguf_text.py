"""The tokenizer, chat template and sampling defaults inside GGUF metadata, as the files a folder would hold; knows no tensor.

tokenizer.ggml.model "gpt2" is byte-level BPE, its splitting rule named by tokenizer.ggml.pre; "llama" is sentencepiece's scored vocabulary.
"""

import json
from collections.abc import Mapping
from typing import Any

from hetero.errors import BadCheckpoint, UnsupportedModel

NORMAL, CONTROL, USER, BYTE = 1, 3, 4, 6
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|")
DEEPSEEK3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
             r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
# tokenizer.ggml.pre -> the patterns that split text, one after another, as the models' own tokenizer.json write them
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "granite-docling"), (GPT2,)), "smollm": (r"\p{N}", GPT2),
    **dict.fromkeys(("qwen2", "hunyuan"), (WORD + r"\p{N}" + REST,)),
    **dict.fromkeys(("llama-bpe", "llama3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (WORD + r"\p{N}{1,3}" + REST,)),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), (CASED + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3)),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
}
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json, generation_config.json as text. Raises BadCheckpoint, UnsupportedModel naming the key."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise BadCheckpoint("metadata has no tokenizer.ggml.tokens", "the file was converted without its tokenizer: get another one")
    kinds = [int(k) for k in metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))]
    if len(kinds) != len(tokens):
        raise BadCheckpoint(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        made = byte_level(metadata, tokens)
    elif model == "llama":
        made = sentencepiece(metadata, tokens)
    else:
        raise UnsupportedModel(f"tokenizer.ggml.model = {model!r}", "supported: 'gpt2', 'llama'")
    made["added_tokens"] = [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                             "special": kind == CONTROL} for i, kind in enumerate(kinds) if kind in (CONTROL, USER)]
    return {"tokenizer.json": json.dumps(made), "tokenizer_config.json": json.dumps(config(metadata, tokens)),
            "generation_config.json": json.dumps(generation(metadata))}


def byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise UnsupportedModel(f"tokenizer.ggml.pre = {pre!r}", f"supported: {', '.join(sorted(SPLITS))}; or the model as safetensors")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise BadCheckpoint("metadata has no tokenizer.ggml.merges")
    split = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in SPLITS[pre]]
    return document({"type": "BPE", "vocab": vocabulary(tokens), "merges": merges, "ignore_merges": pre in ("llama-bpe", "llama3", "gpt-4o")},
                    {"type": "Sequence", "pretokenizers": [*split, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                                            "use_regex": False}]},
                    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})


def sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Scores rank the merges: a pair joins in the order of its result's score."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise BadCheckpoint("tokenizer.ggml.scores does not fit tokenizer.ggml.tokens")
    known = vocabulary(tokens)
    pairs = [(-float(scores[i]), known[t[:k]], known[t[k:]], t[:k], t[k:]) for t, i in known.items() for k in range(1, len(t))
             if t[:k] in known and t[k:] in known]
    first = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizers = ([{"type": "Prepend", "prepend": "▁"}] if first else []) + [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if first else []
    merges = [[a, b] for *_, a, b in sorted(pairs)]
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    made = document({"type": "BPE", "vocab": known, "merges": merges, "byte_fallback": True, "fuse_unk": True, "unk_token": unknown}, None,
                    {"type": "Sequence", "decoders": decoders})
    return made | {"normalizer": {"type": "Sequence", "normalizers": normalizers}}


def vocabulary(tokens: list[str]) -> dict[str, int]:
    known: dict[str, int] = {}
    for i, token in enumerate(tokens):
        known.setdefault(token, i)
    return known


def document(model: dict[str, Any], pre: dict[str, Any] | None, decoder: dict[str, Any]) -> dict[str, Any]:
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
             "byte_fallback": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": pre,
            "post_processor": None, "decoder": decoder, "model": plain | model}


def config(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ours, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            found[ours] = tokens[token]
    if "tokenizer.ggml.add_bos_token" in metadata:
        found["add_bos_token"] = bool(metadata["tokenizer.ggml.add_bos_token"])
    elif metadata.get("tokenizer.ggml.model") == "llama":
        found["add_bos_token"] = True
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        found["chat_template"] = template
    return found


def generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Every id that ends an answer, and the sampling that the publisher recommends."""
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    found: dict[str, Any] = {"eos_token_id": sorted({e for e in ends if isinstance(e, int)})}
    return found | {ours: metadata[f"general.sampling.{key}"] for key, ours in SAMPLING.items() if f"general.sampling.{key}" in metadata}
