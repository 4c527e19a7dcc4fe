"""The bank: what arrives is kept or measured, loading twice gives the same bytes, and a torn or impossible cache never hurts."""
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from cpu_kernels import FORMATS
from hetero.arch import families
from hetero.errors import BadCheckpoint, BadOption
from hetero.memory import arena, bank, packed
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.dummy import Dummy
from hetero.weights.source import EMBEDDED, open_folder


def open_(folder):
    source = open_folder(folder)
    return Checkpoint(source, families.read(source.config))


def test_the_embedded_codes_and_scales_are_kept_exactly():
    b = bank.load(open_(EMBEDDED), threads=2)
    raw = load_file(EMBEDDED / "model.safetensors")
    assert set(b.formats.values()) == {"int8_g32"} and all(o.kept and o.error == 0 for o in b.filled.origins.values())
    for l, e, part in ((0, 0, "gate"), (3, 17, "up"), (7, 31, "down")):
        at = f"model.layers.{l}.mlp.experts.{e}.{part}_proj"
        codes, scales = raw[f"{at}.weight"].numpy().astype(np.float64), raw[f"{at}.weight_scale"].double().numpy()
        assert np.array_equal(b.stores[l].dequantize(e, part), (codes.reshape(len(codes), -1, 32) * scales[:, :, None]).reshape(codes.shape))


@pytest.mark.parametrize(("family", "asked", "bound"), [
    ("qwen3_moe", "f32", 0.0), ("qwen3_moe", "bf16", 3e-3), ("qwen3_moe", "int8_g32", 8e-3), ("qwen3_moe", "int4_g32", 0.12), ("gpt_oss", "f32", 0.0),
    ("deepseek_v2", "f32", 0.0)])
def test_each_format_holds_every_expert_within_its_error(family, asked, bound, tiny):
    c = open_(tiny(family))
    b = bank.load(c, asked, threads=2)
    assert sorted(b.stores) == list(c.model.moe_layers)
    for l, store in b.stores.items():
        assert b.filled.origins[l].error <= bound and b.filled.origins[l].arrived == "f32" and store.format.name == asked
        for e in range(store.experts):
            assert bank.difference(store, e, c.expert(l, e)) <= bound
        if family == "gpt_oss":
            assert np.array_equal(b.biases[l]["down"], c.expert_biases(l)["down"]) and b.biases[l]["gate"].shape == (store.experts, store.inter)


def test_the_second_start_reads_the_same_bytes_from_the_packed_cache(tiny, tmp_path):
    c, seen = open_(tiny("qwen3_moe", "bfloat16")), []
    first = bank.load(c, cache_dir=tmp_path, threads=2, progress=lambda *a: seen.append(a))
    assert first.filled.by == "checkpoint" and first.filled.cache_note == "" and seen[-1][1] == seen[-1][2]
    second = bank.load(c, cache_dir=tmp_path, threads=2)
    assert second.filled.by == "packed cache" and second.filled.origins == first.filled.origins
    assert np.array_equal(first.arena.memory, second.arena.memory)
    other = bank.load(c, "int8_g32", cache_dir=tmp_path)
    assert other.filled.by == "checkpoint" and len(packed.entries(tmp_path)) == 2
    os.utime(tiny("qwen3_moe", "bfloat16") / "model.safetensors")
    assert bank.load(open_(tiny("qwen3_moe", "bfloat16")), cache_dir=tmp_path).filled.by == "checkpoint"


def test_bytes_packed_by_older_code_are_not_read_and_make_room(tiny, tmp_path, monkeypatch):
    c = open_(tiny("olmoe", "bfloat16"))
    bank.load(c, cache_dir=tmp_path)
    old = packed.entries(tmp_path)
    bank.load(c, "int8_g32", cache_dir=tmp_path)
    monkeypatch.setattr(bank, "packing_version", lambda: "newer")
    assert bank.load(c, cache_dir=tmp_path).filled.by == "checkpoint"
    assert len(packed.entries(tmp_path)) == 2 and old[0].key not in {e.key for e in packed.entries(tmp_path)}


@pytest.mark.parametrize("damage", ["cut", "short", "grown", "magic", "header"])
def test_a_torn_cache_file_is_ignored_and_replaced(damage, tiny, tmp_path):
    c = open_(tiny("mixtral", "bfloat16"))
    want = bank.load(c, cache_dir=tmp_path).arena.memory
    path = packed.entries(tmp_path)[0].path
    raw = path.read_bytes()
    path.write_bytes({"cut": raw[:-40], "short": raw[:10], "grown": raw + b"x", "magic": b"x" + raw[1:], "header": raw[:24] + b"\xff" * 40 + raw[64:]}[damage])
    assert not packed.entries(tmp_path)[0].whole
    again = bank.load(c, cache_dir=tmp_path)
    assert again.filled.by == "checkpoint" and np.array_equal(again.arena.memory, want) and packed.entries(tmp_path)[0].whole


def test_a_full_or_read_only_disk_is_said_and_leaves_nothing(tiny, tmp_path, monkeypatch):
    c = open_(tiny("mixtral", "bfloat16"))
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda _: type("U", (), {"free": 1000})())
    assert "free" in bank.load(c, cache_dir=tmp_path / "full").filled.cache_note
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    assert "Not a directory" in bank.load(c, cache_dir=tmp_path / "file").filled.cache_note

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(packed, "write_all", full)
    assert "No space left" in bank.load(c, cache_dir=tmp_path / "late").filled.cache_note
    assert packed.entries(tmp_path / "late") == []


def test_the_cache_lists_removes_and_prunes(tiny, tmp_path):
    for family in ("mixtral", "olmoe"):
        bank.load(open_(tiny(family, "bfloat16")), cache_dir=tmp_path)
    old, new = sorted(packed.entries(tmp_path), key=lambda e: e.used_at)
    os.utime(old.path, (1000, 1000))
    (packed.place(tmp_path) / "abcd.999999999.tmp").write_text("left behind")
    (packed.place(tmp_path) / f"abcd.{os.getpid()}.tmp").write_text("being written")
    assert {e.path.name for e in packed.prune(tmp_path)} == {"abcd.999999999.tmp"}
    assert [e.key for e in packed.prune(tmp_path, unused_s=3600)] == [old.key]
    with pytest.raises(BadOption, match="nothing"):
        packed.remove(tmp_path, ["no-such-model"])
    assert [e.key for e in packed.remove(tmp_path, [new.key[:6]])] == [new.key]
    assert packed.prune(tmp_path, keep_bytes=0) == []


def test_dummy_weights_fill_a_bank_with_finite_records():
    config = json.loads((EMBEDDED / "config.json").read_text())
    b = bank.load(Dummy(families.read(config)), "int4_g32", threads=2)
    w = b.stores[3].dequantize(9, "down")
    assert b.filled.by == "dummy" and np.isfinite(w).all() and 0.5 < w.std() * w.shape[1] ** 0.5 < 2
    assert np.array_equal(b.stores[0].record(1), b.stores[7].record(5)) and not np.array_equal(b.stores[0].record(1), b.stores[0].record(2))


def test_damaged_weights_are_named(tiny, monkeypatch):
    c = open_(tiny("mixtral"))
    good = c.expert

    def spoiled(l, e):
        w = good(l, e)
        if (l, e) == (2, 3):
            w.up.data.setflags(write=False)
            data = w.up.data.copy()
            data[1, 1] = np.nan
            return type(w)(w.gate, type(w.up)("f32", data), w.down)
        return w
    monkeypatch.setattr(c, "expert", spoiled)
    with pytest.raises(BadCheckpoint, match=r"layer 2.*up.*expert 3"):
        bank.load(c, "int8_g32", threads=2)


def test_the_arena_is_aligned_zeroed_in_pieces_and_tells_its_huge_pages(monkeypatch):
    a = arena.Arena((5 << 20) + 123)
    assert a.memory.ctypes.data % arena.HUGE_BYTES == 0 and a.memory.nbytes == a.nbytes and not a.memory.any()
    monkeypatch.setattr(arena, "PIECE_BYTES", 2 << 20)
    assert a.pieces() == [(0, 2 << 20), (2 << 20, 2 << 20), (4 << 20, (1 << 20) + 123)]
    a.memory[:] = 7
    huge = a.ask_for_huge_pages()
    assert huge.advice in ("collapse", "hugepage", "none") and 0 <= huge.nbytes <= a.nbytes and (a.memory == 7).all()


@pytest.mark.slow
def test_peak_memory_while_packing_stays_near_the_final(tmp_path):
    """A child packs 384 MB of bf16 experts to int8 and reports its own peak: at most 1.05 × final + 512 MiB, less what lies in the page cache."""
    script = textwrap.dedent("""
        import json, sys
        from pathlib import Path
        from hetero.arch import families
        from hetero.memory import bank
        from hetero.weights.checkpoint import Checkpoint
        from hetero.weights.source import open_folder
        folder = Path(sys.argv[1])
        source = open_folder(folder)
        c = Checkpoint(source, families.read(source.config))
        def status(key):                     # not ru_maxrss, which a child takes over from the parent that forked it
            return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key)).split()[1]) * 1024
        base = status("VmRSS")
        b = bank.load(c, "int8_g32", threads=2)
        print(json.dumps([status("VmHWM") - base, b.arena.nbytes]))
    """)
    make = textwrap.dedent("""
        import sys, torch, json
        from pathlib import Path
        from safetensors.torch import save_file
        from transformers import Qwen3MoeConfig
        from hetero.arch import families, tensors
        folder = Path(sys.argv[1])
        shape = {"vocab_size": 256, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                 "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 2}
        config = Qwen3MoeConfig(**shape).to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({t.name: torch.randn(t.shape).bfloat16() for t in tensors.of(families.read(config))}, folder / "model.safetensors")
    """)
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", make, tmp_path], check=True, cwd=root)
    out = subprocess.run([sys.executable, "-c", script, tmp_path], check=True, cwd=root, capture_output=True, text=True).stdout
    grown, final = json.loads(out.splitlines()[-1])
    assert final >= FORMATS["int8_g32"].nbytes(512, 1024) * 3 * 128
    assert grown <= 1.05 * final + (512 << 20), (grown, final)


def test_an_origin_says_exact_only_where_nothing_was_rounded():
    assert str(bank.Origin("int8_g32", "int8_g32", True, 0.0)) == "int8_g32 -> int8_g32, exact"
    assert str(bank.Origin("q8_0", "int8_g32", True, 0.001)) == "q8_0 -> int8_g32, codes kept, error 1.0e-03"
    assert str(bank.Origin("bf16", "int4_g32", False, 0.08)) == "bf16 -> int4_g32, error 8.0e-02"
