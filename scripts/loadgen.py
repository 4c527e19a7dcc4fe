#!/usr/bin/env python3
"""MLPerf LoadGen against the server: the Server scenario (queries arrive at random, limits on TTFT and TPOT) and Offline (all at once).

LoadGen issues the queries and judges the times; this file turns each into a streamed completion and tells LoadGen of its first token and its last.
The limits are the scenario's: 99th percentiles of time to first token and of time per token after it. Makes its own environment with pip.

    python scripts/loadgen.py [--qps 4] [--seconds 120] [--tokens 24] [--ttft-ms 1000] [--tpot-ms 100] [--clients 16] [SERVER FLAGS ...]
"""

import argparse
import json
import os
import queue
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

from endpoint import environment, server

EVAL = Path(__file__).resolve().parents[1] / "hetero" / "embedded" / "eval" / "mixed.jsonl"


class Clients:
    """Threads that ask the server, one streamed completion per sample."""

    def __init__(self, url: str, prompts: list[str], tokens: int, count: int, lg: Any) -> None:
        self.url, self.prompts, self.tokens, self.lg = url, prompts, tokens, lg
        self.failed: list[str] = []
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self.work, daemon=True).start()

    def issue(self, samples: list[Any]) -> None:
        for sample in samples:
            self.inbox.put((sample.id, sample.index))

    def flush(self) -> None:
        pass

    def work(self) -> None:
        while True:
            id, index = self.inbox.get()
            try:
                made = self.ask(id, self.prompts[index])
            except (OSError, ValueError) as e:
                self.failed.append(str(e))
                made = 1
            self.lg.QuerySamplesComplete([self.lg.QuerySampleResponse(id, 0, 0, made)])

    def ask(self, id: int, prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        first, made = True, 0
        with urllib.request.urlopen(request, timeout=600) as r:
            for line in r:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                if first and event["choices"]:
                    first = False
                    self.lg.FirstTokenComplete([self.lg.QuerySampleResponse(id, 0, 0, 1)])
                made = (event.get("usage") or {}).get("completion_tokens", made)
        return int(made)


def run(args: argparse.Namespace, url: str, scenario: str, folder: Path) -> tuple[str, list[str]]:
    """One scenario; LoadGen's summary, and what failed."""
    import mlperf_loadgen as lg  # type: ignore[import-not-found]

    prompts = [json.loads(line)["text"].split("<|im_end|>")[0][:400] for line in EVAL.read_text().splitlines()]
    clients = Clients(url, prompts, args.tokens, args.clients if scenario == "Server" else 2 * args.clients, lg)
    s = lg.TestSettings()
    s.scenario, s.mode = getattr(lg.TestScenario, scenario), lg.TestMode.PerformanceOnly
    s.use_token_latencies = True
    s.server_target_qps, s.offline_expected_qps = args.qps, args.offline_qps
    s.ttft_latency, s.tpot_latency = args.ttft_ms * 1_000_000, args.tpot_ms * 1_000_000
    s.min_duration_ms, s.min_query_count = args.seconds * 1000, max(1, int(args.qps * args.seconds))
    out, log = lg.LogOutputSettings(), lg.LogSettings()
    out.outdir, out.copy_summary_to_stdout = str(folder), False
    log.log_output, log.enable_trace = out, False
    sut, qsl = lg.ConstructSUT(clients.issue, clients.flush), lg.ConstructQSL(len(prompts), len(prompts), lambda _: None, lambda _: None)
    lg.StartTestWithLogSettings(sut, qsl, s, log)
    lg.DestroyQSL(qsl)
    lg.DestroySUT(sut)
    return (folder / "mlperf_log_summary.txt").read_text(), clients.failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--qps", type=float, default=4.0)
    parser.add_argument("--offline-qps", type=float, default=30.0, help="more than the server reaches, so that Offline lasts long enough")
    parser.add_argument("--seconds", type=int, default=120, help="a valid Server result takes about 460 queries")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ttft-ms", type=int, default=1000)
    parser.add_argument("--tpot-ms", type=int, default=100)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--scenario", choices=["Server", "Offline"], help="this one alone")
    parser.add_argument("--url", help="a server that is there already")
    args, flags = parser.parse_known_args()
    python = environment("loadgen", "mlcommons-loadgen>=5.1")
    if args.url is None:
        with server(None, *flags) as (url, _):
            return os.spawnv(os.P_WAIT, python, [str(python), __file__, "--url", url, *sys.argv[1:]])
    bad = 0
    for scenario in (args.scenario,) if args.scenario else ("Server", "Offline"):
        with tempfile.TemporaryDirectory() as folder:
            summary, failed = run(args, args.url, scenario, Path(folder))
        print(summary.split("No warnings")[0].split("Test Parameters Used")[0])
        print("\n".join(f"failed: {f}" for f in failed[:5]))
        bad += bool(failed)
    return bad


if __name__ == "__main__":
    sys.exit(main())
