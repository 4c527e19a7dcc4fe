"""Downloads from a hub faked on loopback: what is fetched, resumed, refused and said."""
import hashlib
import http.server
import json
import re
import shutil
import threading

import pytest

from hetero.arch import families
from hetero.errors import DownloadFailed, UnsupportedModel
from hetero.weights import hub
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.source import open_source

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The few endpoints that the client calls, over loopback. `repos`: name -> {file: bytes}; `answers`: name -> (status, error code)."""

    def __init__(self):
        self.repos, self.answers, self.log, self.cut = {}, {}, [], {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                outer.answer(self, body=False)

            def do_GET(self):
                outer.answer(self, body=True)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, h, body):
        path = h.path.split("?")[0]
        self.log.append((h.command, path, h.headers.get("Authorization"), h.headers.get("Range")))
        m = re.match(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+|/(tree)/[^/]+)?$", path)
        f = re.match(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)$", path)
        name = (m or f)[1]
        if name in self.answers or name not in self.repos:
            status, code = self.answers.get(name, (404, "RepoNotFound"))
            return self.send(h, status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"}, body)
        files = self.repos[name]
        if m:
            tree = [{"type": "file", "path": n, "rfilename": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest(), "blobId": hashlib.sha1(d).hexdigest()}
                    for n, d in files.items()]
            return self.send(h, 200, json.dumps(tree if m[2] else {"id": name, "sha": SHA, "siblings": tree}).encode(), {"Content-Type": "application/json"}, body)
        data = files[f[2]]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        status, start = 200, 0
        if (r := h.headers.get("Range")) and body:
            start = int(re.match(r"bytes=(\d+)-", r)[1])
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(data) - 1}/{len(data)}"
        if body and f[2] in self.cut and not start:
            return self.send(h, status, data[start:], headers, body, self.cut.pop(f[2]))
        return self.send(h, status, data[start:], headers, body)

    def send(self, h, status, data, headers, body, cut=None):
        h.send_response(status)
        for k, v in headers.items():
            h.send_header(k, v)
        h.send_header("Content-Length", str(len(data)))
        h.end_headers()
        if body:
            h.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            h.close_connection = True


@pytest.fixture
def fake(monkeypatch):
    made = Hub()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield made
    made.server.shutdown()
    made.server.server_close()


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_model_is_fetched_with_its_needed_files_only_and_progress_ends_at_the_total(fake, tiny, tmp_path):
    fake.repos["a/b"] = files_of(tiny("qwen3_moe")) | {"pytorch_model.bin": b"x" * 99, "README.md": b"hi", "tokenizer.json": b"{}"}
    seen = []
    folder = hub.fetch("a/b", cache_dir=tmp_path, endpoint=fake.url, progress=lambda *a: seen.append(a))
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert seen[-1][0] == "downloading" and seen[-1][1] == seen[-1][2] == sum(p.stat().st_size for p in folder.iterdir())
    assert any(token == "Bearer hf_secret" for *_, token, _ in fake.log)
    source = open_source("a/b", lambda n: hub.fetch(n, cache_dir=tmp_path, endpoint=fake.url))
    assert Checkpoint(source, families.read(source.config)).expert_format(0) == "f32"
    assert hub.fetch("a/b", cache_dir=tmp_path, endpoint="http://127.0.0.1:9") == folder              # no network: the copy serves
    assert hub.fetch("a/b", offline=True, cache_dir=tmp_path) == folder


def test_a_broken_download_is_resumed_where_it_stopped(fake, tmp_path):
    fake.repos["a/b"] = {"config.json": b"{}", "model.safetensors": b"0123456789" * 2_500_000}
    fake.cut["model.safetensors"] = 21_000_000
    folder = hub.fetch("a/b", cache_dir=tmp_path, endpoint=fake.url)
    assert (folder / "model.safetensors").read_bytes() == fake.repos["a/b"]["model.safetensors"]
    again = [r for c, p, _, r in fake.log if c == "GET" and p.endswith("model.safetensors")][-1]
    assert again is not None and int(again.removeprefix("bytes=").removesuffix("-")) >= 10_000_000


@pytest.mark.parametrize(("status", "code", "words", "hint"), [
    (403, "GatedRepo", ["gated", "403"], "HF_TOKEN"), (401, "GatedRepo", ["gated"], "accept it at"), (401, "RepoNotFound", ["private", "401"], "HF_TOKEN"),
    (404, "RepoNotFound", ["not there", "404"], "spelling"), (404, "RevisionNotFound", ["revision"], "tree"), (403, "", ["403"], "HF_TOKEN"),
    (418, "", ["HTTP 418"], "HF_ENDPOINT")])
def test_what_the_hub_refuses_is_named_with_its_remedy(status, code, words, hint, fake, tmp_path):
    fake.answers["a/b"] = (status, code)
    with pytest.raises(DownloadFailed) as e:
        hub.fetch("a/b", cache_dir=tmp_path, endpoint=fake.url)
    assert all(w in e.value.message for w in ["a/b", *words]) and hint in e.value.hint and "\n" not in e.value.message
    assert "hf_secret" not in str(e.value)


def test_no_network_and_no_copy_is_one_clear_line(tmp_path):
    with pytest.raises(DownloadFailed, match="cannot be reached"):
        hub.fetch("a/b", cache_dir=tmp_path, endpoint="http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match="offline"):
        hub.fetch("a/b", offline=True, cache_dir=tmp_path)
    with pytest.raises(DownloadFailed, match="not a hub name"):
        hub.fetch("a--b/..c", cache_dir=tmp_path, endpoint="http://127.0.0.1:9")


def test_a_full_disk_is_found_out_before_downloading(fake, tiny, tmp_path, monkeypatch):
    fake.repos["a/b"] = files_of(tiny("qwen3_moe"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("U", (), {"free": 1000})())
    with pytest.raises(DownloadFailed, match="GB free"):
        hub.fetch("a/b", cache_dir=tmp_path / "not" / "yet", endpoint=fake.url)
    assert not any("/resolve/" in p for _, p, *_ in fake.log)


@pytest.mark.parametrize(("files", "quant", "want"), [
    (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], "q8_0", ["m-Q8_0.gguf"]),
    (["Q4/m-00001-of-00002.gguf", "Q4/m-00002-of-00002.gguf", "mmproj-f16.gguf"], None, ["Q4/m-00001-of-00002.gguf", "Q4/m-00002-of-00002.gguf"]),
    (["config.json", "a-00001-of-00001.safetensors", "model.safetensors.index.json", "original/x.safetensors"], None,
     ["a-00001-of-00001.safetensors", "config.json", "model.safetensors.index.json"]),
    (["model.safetensors", "consolidated.safetensors", "config.json"], None, ["model.safetensors", "config.json"])])
def test_only_one_kind_of_weights_is_chosen(files, quant, want):
    assert hub.choose("a/b", files, quant) == want


@pytest.mark.parametrize("files", [["m-Q4_K_M.gguf", "m-Q8_0.gguf"], ["pytorch_model.bin"], ["README.md"]])
def test_what_cannot_be_chosen_is_refused(files):
    with pytest.raises(UnsupportedModel, match="a/b"):
        hub.choose("a/b", files, None)
