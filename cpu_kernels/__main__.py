"""`python -m cpu_kernels`: what the kernels reach on this machine, as a share of what it can do at most. Knows the package's public names only.

Decode: experts rotate through more memory than any cache holds; GB/s of weights, and the share of the read ceiling taken in the same round.
Prefill: whole FFNs, packing of activations included; TOPS, and the share of the tile peak on random data taken in the same round.
Median of the rounds' shares; `±` is half the distance between their quartiles.
"""
import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from . import FORMATS, ExpertLayer, ExpertStore, Team, ceilings, cpu, plain, tiles

Row = dict[str, Any]


def fill(store: ExpertStore) -> None:
    """Random weights: one quantized expert, its bytes in every record (what is read does not depend on what it holds)."""
    rng = np.random.default_rng(0)
    H, I = store.hidden, store.inter
    gate, up, down = (rng.standard_normal(shape).astype(np.float32) * np.float32(shape[1] ** -0.5) for shape in ((I, H), (I, H), (H, I)))
    store.put(0, gate if store.gated else None, up, down)
    records = store.buffer.reshape(store.experts, -1)
    records[1:] = records[0]


def quartiles(samples: list[float]) -> tuple[float, float]:
    """Median, and half the distance between the quartiles."""
    ordered = sorted(samples)
    q = len(ordered) // 4
    return statistics.median(ordered), (ordered[-1 - q] - ordered[q]) / 2


def decode(layer: ExpertLayer, team: Team, tokens: int, top_k: int, rounds: int) -> Row:
    """`tokens` tokens that share top_k experts, other experts each time."""
    store = layer.store
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, store.hidden)).astype(np.float32)
    weights, out = np.full((tokens, top_k), 1 / top_k, np.float32), np.empty_like(x)
    order, at, nbytes = rng.permutation(store.experts).astype(np.int32), 0, top_k * store.record_nbytes
    calls = max(1, (64 << 20) // nbytes)
    speeds, shares = [], []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for _ in range(calls):
            ids = np.ascontiguousarray(np.broadcast_to(order[np.arange(at, at + top_k) % store.experts], (tokens, top_k)))
            at += top_k
            layer.run(x, ids, weights, out, team)
        speed = calls * nbytes / (time.perf_counter() - begin)
        part = rng.integers(0, max(1, store.buffer.nbytes - (64 << 20))) // 64 * 64
        piece = store.buffer[part:part + (64 << 20)]
        whole = piece.nbytes // ceilings.CHUNK_NBYTES * ceilings.CHUNK_NBYTES
        ceiling = max(whole / ceilings.read_s(team, piece, ahead) for ahead in (False, True))
        speeds.append(speed)
        shares.append(speed / ceiling)
    share, noise = quartiles(shares[1:])
    speeds = [s / 1e9 for s in speeds[1:]]
    return {"what": "decode", "tokens": tokens, "GB/s": statistics.median(speeds), "best": max(speeds), "share": share, "±": noise}


def prefill(layer: ExpertLayer, team: Team, per_expert: int, precision: str, rounds: int) -> Row:
    """Every token to one expert; enough experts that each thread has several."""
    store = layer.store
    experts = min(store.experts, max(2 * team.threads, 4, -(-1024 // per_expert)))
    rng = np.random.default_rng(2)
    T = per_expert * experts
    x = rng.standard_normal((T, store.hidden)).astype(np.float32)
    ids = (np.arange(T, dtype=np.int32) % experts)[:, None].copy()
    weights, out = np.ones((T, 1), np.float32), np.empty_like(x)
    ops = 2.0 * T * store.hidden * store.inter * (2 + store.gated)
    speeds, shares = [], []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        layer.run(x, ids, weights, out, team, precision)
        speed = ops / (time.perf_counter() - begin)
        speeds.append(speed)
        if layer.amx:
            shares.append(speed / ceilings.tile_ops_s(team, precision != "fast" or store.format.name == "bf16", 50_000))
    share, noise = quartiles(shares[1:]) if shares else (float("nan"), float("nan"))
    speeds = [s / 1e12 for s in speeds[1:]]
    return {"what": f"prefill {precision}", "tokens": per_expert, "TOPS": statistics.median(speeds), "best": max(speeds), "share": share, "±": noise}


def error(layer: ExpertLayer, team: Team, tokens: int, precision: str) -> float:
    """Relative error of the whole FFN against float64 on the dequantized weights and the unrounded activations."""
    store = layer.store
    x = np.random.default_rng(3).standard_normal((tokens, store.hidden)).astype(np.float32)
    ids, weights, out = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32), np.empty_like(x)
    layer.run(x, ids, weights, out, team, precision)
    w = [store.dequantize(0, n) for n in ("gate", "up", "down")]
    act = (layer.act.kind, layer.act.alpha, layer.act.limit, layer.act.up_shift)
    ref = plain.moe(store.format, x, ids, weights, lambda _: (w[0], w[1], w[2]), act, None, "output", rounded=False)
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


def measure(args: argparse.Namespace, team: Team) -> list[Row]:
    rows: list[Row] = []
    hidden, inter = (int(n) for n in args.shape.split("x"))
    for format in args.formats.split(","):
        record = FORMATS[format].expert_nbytes(hidden, inter)
        store = ExpertStore(format, max(args.top_k, int(args.gib * 2**30) // record), hidden, inter)
        fill(store)
        layer = ExpertLayer(store)
        told = {"format": format, "isa": cpu.isa(), "threads": team.threads, "switch": layer.tune(team)}
        print(f"{format}: {store.experts} experts of {record:,} B; tile products from {layer.switch} tokens", file=sys.stderr)
        for tokens in (int(t) for t in args.tokens.split(",") if int(t) <= 8):
            rows.append(told | decode(layer, team, tokens, args.top_k, args.rounds) | {"error": error(layer, team, tokens, "accurate")})
            show(rows[-1])
        for tokens in (int(t) for t in args.tokens.split(",") if int(t) > 8):
            for precision in ("accurate", "fast") if layer.amx and format != "bf16" else ("accurate",):
                rows.append(told | prefill(layer, team, tokens, precision, args.rounds) | {"error": error(layer, team, tokens, precision)})
                show(rows[-1])
    return rows


def show(row: Row) -> None:
    unit = "GB/s" if "GB/s" in row else "TOPS"
    print(f"{row['format']:9s} {row['isa']:12s} {row['threads']:3d} threads  {row['what']:17s} {row['tokens']:5d} tokens per expert  "
          f"{row[unit]:8.3f} {unit} (best {row['best']:.3f})  share {row['share']:.3f} ± {row['±']:.3f}  error {row['error']:.1e}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cpu_kernels", description="GB/s and TOPS of every format against this machine's own ceilings.")
    parser.add_argument("--shape", default="2048x768", help="hidden × inter of an expert (default: Qwen3-30B-A3B's)")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--formats", default="int4_g32,int8_g32,bf16")
    parser.add_argument("--tokens", default="1,2,4,8,32,64,128,256,1024", help="tokens per expert; up to 8 as decode, more as prefill")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--gib", type=float, default=3.5, help="memory that the experts rotate through")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="the rows as JSON on stdout")
    args = parser.parse_args()
    with Team(threads=args.threads) as team, team.seat():
        machine = {"cpu": cpu.read().name, "isa": cpu.isa(), "threads": team.threads}
        if cpu.isa() == "amx" and tiles.permitted():
            machine |= {f"{name} TOPS": round(ceilings.tile_ops_s(team, name == "bf16") / 1e12, 3) for name in ("bf16", "int8")}
        print("  ".join(f"{k} {v}" for k, v in machine.items()), file=sys.stderr)
        rows = measure(args, team)
    if args.json:
        print(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
