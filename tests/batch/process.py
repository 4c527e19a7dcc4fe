"""A batch as a process of its own, and what it wrote."""
import json
import subprocess
import sys
from pathlib import Path

from hetero.weights.source import EMBEDDED

ROOT = Path(__file__).resolve().parents[2]
TINY = EMBEDDED.parent / "tiny"


def command(folder, *more, model=TINY, out="out.jsonl"):
    return [sys.executable, "-m", "hetero", "batch", "run", str(folder / "in.jsonl"), "-o", str(folder / out), "--model", str(model), "--deterministic",
            "--ctx", "256", "--max-batch", "16", "--cache-dir", str(folder.parent / "cache"), "--progress", "lines", "--seed", "5", *more]


def start(*args, **more):
    return subprocess.Popen(command(*args), cwd=ROOT, stderr=subprocess.PIPE, text=True, **more)


def rows_of(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for row in found:
        row["response"]["body"].pop("created", None)
    assert len({row["custom_id"] for row in found}) == len(found)
    return {row["custom_id"]: row for row in found}


def write(folder, count, tokens):
    folder.mkdir(exist_ok=True)
    with (folder / "in.jsonl").open("w") as file:
        for i in range(count):
            body = {"max_tokens": tokens, "temperature": 1.0}
            if i % 2:
                file.write(json.dumps({"id": f"r{i}", "messages": [{"role": "user", "content": f"A story about {i % 9} cats and {i} dogs"}], **body}) + "\n")
            else:
                file.write(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"Once there were {i} mice", **body}}) + "\n")
