"""Reads a model's config and accounts for every key: a key nobody read is a model we do not understand; knows no family."""

from difflib import get_close_matches
from typing import Any

from hetero.errors import UnsupportedModel

# Keys that never change what a token becomes: bookkeeping, ids of special tokens, training and generation leftovers.
HARMLESS = frozenset("""
_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _name_or_path architectures attention_dropout
attn_dropout auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout compression_config
cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop embedding_dropout
encoder_no_repeat_ngram_size eod_token_id eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
hidden_dropout id2label initializer_range input_jitter_noise is_decoder keys_to_ignore_at_inference label2id length_penalty max_length
max_new_tokens max_position_embeddings max_window_layers min_length model_max_length model_name model_type mtp_num_hidden_layers
mtp_transformer_layers mtp_use_dedicated_embeddings name_or_path no_repeat_ngram_size num_beam_groups num_beams num_mtp_layers num_mtp_modules
num_nextn_predict_layers num_return_sequences output_attentions use_mtp
output_dropout output_hidden_states output_router_logits output_scores pad_id pad_token_id prefix pretraining_tp problem_type quantization_config
remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef router_jitter_noise
router_z_loss_coef sep_token_id seq_aux suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k
top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
""".split())  # noqa: SIM905
# Harmless at these values only; at any other the model is another one.
EXPECTED: dict[str, tuple[Any, ...]] = {"add_cross_attention": (False,), "is_encoder_decoder": (False,), "pruned_heads": ({}, []), "ep_size": (1,),
                                        "adapters": (), "attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False,),
                                        "layer_types": ("full_attention",)}
MISSING: Any = object()


class Fields:
    """One level of a config.json. `where` names it in errors ("text_config."); reading a key marks it as understood."""

    def __init__(self, config: dict[str, Any], where: str = "") -> None:
        self.config, self.where, self.seen = config, where, set(HARMLESS)

    def __call__(self, *names: str, default: Any = MISSING) -> Any:
        """The value of the first of these names that is present and not null."""
        self.seen.update(names)
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        if default is MISSING:
            raise UnsupportedModel(f"config has no {' or '.join(self.where + n for n in names)}", "this key is needed to know the model's shape")
        return default

    def count(self, *names: str, default: Any = MISSING, least: int = 1, most: int = 1 << 31) -> Any:
        """A whole number in [least, most]; a list with one and the same value for every layer counts as that value."""
        value = self(*names, default=default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refuse(self.found(names), value, f"a whole number from {least} to {most}")
        return value

    def number(self, *names: str, default: Any = MISSING) -> Any:
        """A finite number as float."""
        value = self(*names, default=default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
            raise self.refuse(self.found(names), value, "a finite number")
        return float(value)

    def flag(self, *names: str, default: Any = MISSING) -> Any:
        value = self(*names, default=default)
        if not isinstance(value, bool) and value is not default:
            raise self.refuse(self.found(names), value, "true or false")
        return value

    def words(self, name: str, length: int, known: dict[str, Any], default: Any = MISSING) -> list[Any]:
        """A list with one word per layer, each turned into what `known` says."""
        value = self(name, default=default)
        if not isinstance(value, list) or len(value) < length:
            raise self.refuse(name, value, f"a list of {length} words, one per layer")
        for word in value[:length]:
            if not isinstance(word, str) or word not in known:
                raise self.refuse(name, word, ", ".join(known))
        return [known[word] for word in value[:length]]

    def indices(self, name: str) -> frozenset[int]:
        """A list of layer numbers."""
        value = self(name, default=[])
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise self.refuse(name, value, "a list of layer numbers")
        return frozenset(value)

    def expect(self, **wanted: Any) -> None:
        """These keys must be absent, null or have this value (or one of this tuple): the arithmetic here assumes it."""
        for name, allowed in wanted.items():
            value = self(name, default=None)
            allowed = allowed if isinstance(allowed, tuple) else (allowed,)
            if value is not None and value not in allowed and not (isinstance(value, list) and value and all(v in allowed for v in value)):
                raise self.refuse(name, value, " or ".join(map(repr, allowed)) or "only the key's absence")

    def skip(self, *names: str) -> None:
        """These keys say nothing that matters here."""
        self.seen.update(names)

    def found(self, names: tuple[str, ...]) -> str:
        return next((n for n in names if self.config.get(n) is not None), names[0])

    def refuse(self, name: str, value: Any, supported: str) -> UnsupportedModel:
        shown = repr(value)
        return UnsupportedModel(f"config key {self.where}{name} = {shown if len(shown) < 90 else shown[:87] + '...'}", f"supported: {supported}")

    def done(self) -> None:
        """Raises UnsupportedModel for keys nobody read."""
        self.expect(**{name: values for name, values in EXPECTED.items() if name not in self.seen})
        if left := sorted(key for key in set(self.config) - self.seen if self.config[key] is not None and not key.startswith("//")):
            near = [m for key in left[:3] for m in get_close_matches(key, self.seen - HARMLESS, 1, 0.85)]
            shown = ", ".join(f"{self.where}{key} = {repr(self.config[key])[:40]}" for key in left[:6])
            raise UnsupportedModel(f"config keys with no known meaning: {shown}" + (f" and {len(left) - 6} more" if len(left) > 6 else ""),
                                   f"misspelt {near[0]}?" if near else "they may change the arithmetic; a newer hetero may know them")
