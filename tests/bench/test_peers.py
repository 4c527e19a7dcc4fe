"""The contenders' protocol, on small experts of our own: what is answered is what float64 says, and what cannot run says why."""
import base64
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PEERS = Path(__file__).resolve().parents[2] / "scripts" / "peers"


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    import peer
    for name, value in (("HIDDEN", 128), ("INTER", 64), ("EXPERTS", 8), ("TOP_K", 2)):
        monkeypatch.setattr(peer, name, value)
    return peer


@pytest.mark.parametrize("method", ["f32", "int4_g32"])
def test_our_contender_answers_as_float64_does(peer, method):
    spec = importlib.util.spec_from_file_location("ours", PEERS / "ours.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    experts = module.make(method, 1, 0.0001)
    assert experts.layers == 3
    got = np.frombuffer(base64.b64decode(peer.answer(experts, {"do": "check"}, {})["out"]), np.float32).reshape(3, 128)
    x, weights = peer.inputs(3, 7)
    want = peer.reference(peer.draws(3, 1, np.random.default_rng(5))[0], x, weights)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < {"f32": 1e-5, "int4_g32": 0.25}[method]
    state = {"rng": np.random.default_rng(1), "turn": 0}
    assert peer.answer(experts, {"do": "decode", "calls": 4}, state)["seconds"] > 0 and peer.answer(experts, {"do": "prefill", "tokens": 16}, state)["seconds"] > 0
    assert state["turn"] == 2 and set(module.ceiling(experts)) == {"read", "peak"}
    experts.team.close()


def test_drawn_weights_are_bf16_and_alike_for_all(peer):
    gate, _, down = peer.drawn(1)
    assert gate.shape == (64, 128) and down.shape == (128, 64) and not (gate.view(np.uint32) & 0xFFFF).any() and (peer.drawn(1)[0] == gate).all()
    assert ((peer.bf16(gate).astype(np.uint32) << 16).view(np.float32) == gate).all()
    ids = peer.draws(50, 2, np.random.default_rng(0))
    assert len(ids) == 2 and all(len(set(row)) == 2 for row in ids[0]) and ids[0].dtype == np.int32


def test_a_peer_that_is_not_installed_says_so():
    found = subprocess.run([sys.executable, str(PEERS / "peer.py"), str(PEERS / "kt.py"), "int4", "1", "0.1"], input="", capture_output=True, text=True, timeout=60)
    assert "unable" in json.loads(found.stdout)
