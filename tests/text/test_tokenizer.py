"""Exact bytes for every id, one BOS, the union of ends, one-line errors."""
import itertools
import json
import shutil

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors

from hetero.errors import BadCheckpoint
from hetero.text import tokenizer
from hetero.text.tokenizer import Tokenizer, find_ends


@given(text=st.text(max_size=40))
def test_bytes_of_all_ids_join_to_the_text(tok, text):
    ids = tok.encode_content(text)
    assert b"".join(map(tok.bytes_of, ids)).decode() == text == tok.decode(ids, specials=True)
    assert not set(ids) & tok.specials


def test_the_library_decodes_the_same(tok):
    for text in ("Hello, world", "naïve 😀é漢\n\n  x", "<|im_start|>user\nhi<|im_end|>"):
        ids = tok.encode(text)
        assert tok.decode(ids) == tok.backend.decode(ids, skip_special_tokens=True)
        assert tok.decode(ids, specials=True) == tok.backend.decode(ids, skip_special_tokens=False) == text


def test_control_spellings_are_control_tokens_only_when_asked(tok):
    assert tok.encode("<|im_end|>") == [2]
    assert 2 not in tok.encode_content("a<|im_end|>b<|<|im_end|>")
    assert tok.decode(tok.encode_content("a<|im_end|>b")) == "a<|im_end|>b"


def test_ids_outside_the_vocabulary_have_no_bytes(tok):
    assert [tok.bytes_of(i) for i in (-1, 8192, 10**9)] == [b"", b"", b""]
    assert tok.bytes_of(2) == b"<|im_end|>"


def sentencepiece(prepend=True, bos=True):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}, "▁": 259, "▁a": 260, "b": 261, "▁b": 262}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if prepend else []), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if prepend else [])])
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<unk>", "<s>", "</s>")])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def test_sentencepiece_pieces_and_byte_fallback_have_exact_bytes():
    tok = Tokenizer(sentencepiece(), {}, {})
    ids = tok.encode("b b é")
    assert b"".join(map(tok.bytes_of, ids)).decode() == " b b é"
    assert tok.decode(ids) == tok.backend.decode(ids) == "b b é"


@pytest.mark.parametrize("added, config, bos", [(True, {}, 1), (False, {}, None), (True, {"add_bos_token": False, "bos_token": "<s>"}, None),
                                                (False, {"add_bos_token": True, "bos_token": {"content": "<s>"}}, 1), (False, {"add_bos_token": True}, None)])
def test_a_raw_prompt_gets_one_bos_when_the_model_has_one(added, config, bos):
    tok = Tokenizer(sentencepiece(bos=added), config, {})
    assert tok.bos == bos
    assert tok.encode_prompt("b").count(1) == (bos is not None)
    assert tok.encode_prompt("<s>b").count(1) == 1


@pytest.mark.parametrize("named, model, generation", list(itertools.product((None, "<|im_end|>", {"content": "<|im_end|>"}), (None, 0, [0, 5]), (None, 7, [2, 7], "missing"))))
def test_ends_are_the_union_of_all_sources(tok, named, model, generation):
    want = ({2} if named else set()) | set(tokenizer.ids_of(model)) | (set(tokenizer.ids_of(generation)) if generation != "missing" else set())
    found = find_ends(tok.backend, {"eos_token": named}, {"eos_token_id": model}, {} if generation == "missing" else {"eos_token_id": generation})
    assert set(found) == want
    assert all(places for places in found.values())


def test_ends_of_the_embedded_model_name_their_files(tok):
    assert tok.eos == {2: ["tokenizer_config.json", "config.json", "generation_config.json"], 0: ["generation_config.json"]}


def test_a_nested_text_config_names_ends_too(tok):
    assert find_ends(tok.backend, {}, {"text_config": {"eos_token_id": [4]}}, {}) == {4: ["config.json"]}


@pytest.mark.parametrize("name, text, word", [("tokenizer.json", None, "no tokenizer.json"), ("tokenizer.json", "{", "not a tokenizer"), ("tokenizer.json", "{}", "not a tokenizer"),
                                              ("tokenizer_config.json", "[1]", "a JSON object is expected"), ("generation_config.json", "{", "not JSON")])
def test_missing_and_damaged_files_are_one_line_with_a_hint(tmp_path, embedded, name, text, word):
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(embedded / file, tmp_path)
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    with pytest.raises(BadCheckpoint, match=word) as caught:
        tokenizer.read(tmp_path)
    assert str(tmp_path) in caught.value.message and "\n" not in caught.value.message and caught.value.hint


def test_remote_code_is_never_run(tmp_path):
    (tmp_path / "tiktoken.model").write_text("x")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}))
    with pytest.raises(BadCheckpoint, match="auto_map"):
        tokenizer.read(tmp_path)


def test_tokens_that_only_the_config_declares_are_added(tmp_path, embedded):
    shutil.copy(embedded / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"8192": {"content": "<think>", "special": False}}}))
    tok = tokenizer.read(tmp_path)
    assert tok.encode("<think>") == [8192] and tok.size == 8193 and 8192 not in tok.specials
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"9000": {"content": "<think>", "special": False}}}))
    with pytest.raises(BadCheckpoint, match="9000"):
        tokenizer.read(tmp_path)


def test_vocab_and_merges_files_are_converted(tmp_path, embedded):
    data = json.loads((embedded / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(data["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(m) for m in data["model"]["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert tokenizer.read(tmp_path).decode(tokenizer.read(tmp_path).encode("some words")) == "some words"


def test_a_long_text_has_the_ids_of_its_pieces_and_lets_other_threads_go_on(tok):
    """The tokenizer's library holds the interpreter for a single text and not for a batch."""
    import threading
    import time
    text = "The fox said: <|im_end|> hello 😀! " * 6000
    assert tok.encode(text) == tok.backend.encode(text, add_special_tokens=False).ids
    beats, over = [0], threading.Event()

    def beat():
        while not over.is_set():
            beats[0] += 1
            time.sleep(0.001)
    other = threading.Thread(target=beat)
    other.start()
    try:
        before = beats[0]
        tok.encode_content(text)
        assert beats[0] > before + 2
    finally:
        over.set()
        other.join()
