"""The embedded tokenizer, and makers of small tokenizers with any special tokens."""
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import hetero
from hetero.text import tokenizer
from hetero.text.tokenizer import Tokenizer

LETTERS = {b: c for c, b in tokenizer.ALPHABET.items()}
EMBEDDED = Path(hetero.__file__).parent / "embedded" / "model-int8"


@pytest.fixture(scope="session")
def embedded() -> Path:
    return EMBEDDED


@pytest.fixture(scope="session")
def tok() -> Tokenizer:
    return tokenizer.read(EMBEDDED)


@pytest.fixture(scope="session")
def make_tok():
    """A byte-level tokenizer whose ids 0..255 are the bytes, then `words`, then special tokens, then plain added ones."""
    def make(specials=(), plain=(), words=(), config=None, ends=()):
        vocab = dict(tokenizer.ALPHABET)
        for w in words:
            vocab.setdefault("".join(LETTERS[b] for b in w.encode()), len(vocab))
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
        backend.add_special_tokens([tokenizers.AddedToken(s, special=True, normalized=False) for s in specials])
        backend.add_tokens([tokenizers.AddedToken(s, special=False, normalized=False) for s in plain])
        return Tokenizer(backend, config or {}, {backend.token_to_id(e): ["test"] for e in ends})
    return make
