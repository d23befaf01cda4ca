"""What a forecast costs: observe and stream against a plain copy of the same bytes, side by side in one run.

    python benchmarks/forecast.py --sizes 1e6 1e7 1e8 5e8 --lags 1 4 8 --threads 1

`observe` must read theta[t] and theta[t-1] and write theta[t] and one displacement; `stream` reads theta[t] and K
displacements and writes the result: into tensors given to it, as `copy_` does, and into new ones, whose pages the
system has to hand out first. "x copy" is the time taken over the time in which `copy_` moves that many bytes, the copy
being timed between them in the same rounds. The slope is of log time over log N across the sizes, and across those from
1e7 on, which no cache holds.
With --ranks, the cost of observe on each of so many gloo ranks that share N entries; with --step, what all of it is of
a real learner update of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from farl.forecast import ForecastConfig, Moments, init, observe, plan, stream
from farl.forecast.history import STORAGE_BYTES

QUIET = (
    "--learner.num-batches", "8", "--pipeline.launch", "inline", "--task.num-eval", "2", "--record.no-save-model",
    "--record.no-tensorboard", "--record.checkpoint-every-batches", "0",
)  # fmt: skip
LEAF = 4_000_000
"""Entries of a leaf: about those of one matrix of a model of a billion parameters."""
WIDE_LIMIT = 2e8
"""Above it only the default storage is timed: fp32 history of K = 8 at N = 5e8 would take 22 GB beside the copy."""


def leaves_of(size: int) -> list[tuple[str, torch.Tensor]]:
    count = max(1, round(size / LEAF))
    return [(f"leaf{i}", torch.randn(size // count)) for i in range(count)]


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(size: int, config: ForecastConfig, rounds: int) -> dict[str, float]:
    """Seconds of copy (8 bytes an entry), observe, plan and stream, medians over rounds; and bytes an entry."""
    leaves = leaves_of(size)
    size = sum(leaf.numel() for _, leaf in leaves)
    target = [torch.empty_like(leaf) for _, leaf in leaves]
    needs_moments = config.rule == "moments" or config.source == "optimizer"
    moments = {}
    if needs_moments:
        moments = {
            name: Moments(
                kind="adam", first_N=torch.randn_like(leaf), second_N=torch.rand_like(leaf) + 0.1, step=10, lr=1e-5,
                beta1=0.9, beta2=0.95, eps=1e-8,
            )
            for name, leaf in leaves
        }  # fmt: skip
    state = init(leaves, config)
    times: dict[str, list[float]] = {"copy": [], "observe": [], "plan": [], "stream": [], "stream_new": []}
    into = {name: b for (name, _), b in zip(leaves, target, strict=True)}
    for i in range(rounds + config.lags + 2):
        for _, leaf in leaves:
            leaf.add_(1e-5)
        start = time.perf_counter()
        state, _ = observe(state, leaves, moments=moments, lr=1.0)
        took = {"observe": time.perf_counter() - start}
        took["copy"] = timed(lambda: [b.copy_(a) for (_, a), b in zip(leaves, target, strict=True)])
        start = time.perf_counter()
        forecast = plan(state, 1)
        took["plan"] = time.perf_counter() - start
        for name, given in (("stream", into), ("stream_new", None)):
            start = time.perf_counter()
            for _ in stream(state, forecast, leaves, moments=moments, into=given):
                pass  # as they are sent, and gone
            took[name] = time.perf_counter() - start
        if i > config.lags + 1:
            for name, value in took.items():
                times[name].append(value)
    kept = sum(t.numel() * t.element_size() for ring in state.rings.values() for t in ring.tensors.values())
    kept += sum(t.numel() * t.element_size() for t in state.previous.values())
    return {name: statistics.median(values) for name, values in times.items()} | {"bytes": kept / size, "size": size}


def moved_bytes(config: ForecastConfig) -> tuple[float, float]:
    """Bytes an entry that observe and stream have to move."""
    stored = STORAGE_BYTES[config.history_dtype]
    if config.rule == "moments":
        return 0.0, 4 + 8 + 4
    written = 4 + stored if config.source == "weights" else stored
    return 8 + written, 4 + config.lags * stored + 4


def slope(points: list[tuple[float, float]]) -> float:
    """Least-squares slope of log time over log size."""
    xs, ys = [math.log(n) for n, _ in points], [math.log(t) for _, t in points]
    mean_x, mean_y = statistics.mean(xs), statistics.mean(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def sizes_table(arguments) -> list[dict]:
    rows: list[dict] = []
    print("| rule | history | kernels | N | K | bytes / parameter | observe | stream | to new tensors | plan ms |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    kinds = [{"rule": "least_squares", "history_dtype": "bfloat16", "kernels": k} for k in arguments.kernels]
    kinds += [{"rule": "least_squares", "history_dtype": d} for d in ("float32", "int8")] if arguments.all else []
    kinds += [{"rule": "least_squares", "history_dtype": "bfloat16", "source": "optimizer"}, {"rule": "moments"}]
    for kind in kinds:
        for lags in arguments.lags:
            points: dict[str, list[tuple[float, float]]] = {"observe": [], "stream": []}
            for size in arguments.sizes:
                config = ForecastConfig(lags=lags, **kind)
                if size > WIDE_LIMIT and config.history_dtype != "bfloat16":
                    continue
                rounds = arguments.rounds if size < 2e8 else 3
                took = measure(int(size), config, rounds)
                gc.collect()
                per_byte = took["copy"] / (8 * took["size"])
                ideal = [b * took["size"] * per_byte for b in moved_bytes(config)]
                row = {
                    **kind, "N": took["size"], "K": lags, "bytes": took["bytes"], "plan_ms": took["plan"] * 1e3,
                    "observe": took["observe"] / ideal[0] if ideal[0] else took["observe"] / took["copy"],
                    "stream": took["stream"] / ideal[1], "stream_new": took["stream_new"] / ideal[1],
                    "observe_s": took["observe"], "stream_s": took["stream"],
                    "stream_new_s": took["stream_new"], "copy_s": took["copy"],
                }  # fmt: skip
                rows.append(row)
                for name in points:
                    points[name].append((took["size"], took[name]))
                note = "" if ideal[0] else " (of a copy of the weights)"
                print(
                    f"| {kind['rule']} | {kind.get('source', 'weights')}, {config.history_dtype} | "
                    f"{config.kernels} | {took['size']:.0e} | {lags} | {row['bytes']:.1f} | "
                    f"{row['observe']:.2f}{note} | {row['stream']:.2f} | {row['stream_new']:.2f} | "
                    f"{row['plan_ms']:.1f} |",
                    flush=True,
                )
                if kind["rule"] == "moments" and size == max(arguments.sizes):
                    break
            if len(arguments.sizes) > 1:
                text = ", ".join(
                    f"{name} {slope(p):.3f} ({slope([q for q in p if q[0] > 5e6]):.3f} from 1e7)"
                    for name, p in points.items()
                    if sum(size > 5e6 for size, _ in p) > 1
                )
                print(f"| slope in N, K = {lags} | | | | | | {text} | | | |", flush=True)
            if kind["rule"] == "moments":
                break
    return rows


def rank_worker(rank: int, world: int, port: int, size: int, folder: str, rounds: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=300))

    def reduce(tensor):
        if world > 1:
            dist.all_reduce(tensor)
        return tensor

    leaves = leaves_of(size // world)
    state = init(leaves, ForecastConfig(), reduce=reduce)
    times = []
    for _ in range(rounds):
        for _, leaf in leaves:
            leaf.add_(1e-5)
        start = time.perf_counter()
        state, _ = observe(state, leaves, reduce=reduce)
        times.append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "time").write_text(json.dumps(statistics.median(times[2:])))
    if world > 1:
        dist.destroy_process_group()


def ranks_table(ranks: list[int], size: int, rounds: int) -> None:
    print("\n| ranks | entries each | observe, s | per entry and rank, over one rank |\n|---|---|---|---|")
    single = None
    for world in ranks:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_worker, args=(world, port, size, folder, rounds), nprocs=world)
            took = json.loads(Path(folder, "time").read_text())
        each = took * world / size
        single = single or each
        print(f"| {world} | {size // world:.0e} | {took:.3f} | {each / single:.2f} |", flush=True)


def step_table() -> None:
    """Share of a learner update of the recipe smollm2-arithmetic, measured in the product's own loop."""
    from farl.config import apply_overrides, load_recipe
    from farl.forecast import Forecaster
    from farl.train import start

    spent = {"observe": 0.0, "plan": 0.0}

    def counted(name, method):
        def wrapped(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - begin

        return wrapped

    Forecaster.observe = counted("observe", Forecaster.observe)
    Forecaster.plan = counted("plan", Forecaster.plan)
    config = apply_overrides(load_recipe("smollm2-arithmetic"), list(QUIET))
    with tempfile.TemporaryDirectory() as folder:
        start(config, run_dir=Path(folder) / "run", show=False)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    train = sum(line["time/train_s"] for line in lines)
    probe = sum(line.get("time/probe_s", 0.0) for line in lines)
    own = spent["observe"] + spent["plan"]
    print(
        f"\nSmolLM2-135M, {len(lines)} updates of {train / len(lines):.1f} s, from forward pass to observe: "
        f"observe and plan {own / train:.2%}, probe {probe / train:.2%}, together {(own + probe) / train:.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernels", nargs="+", default=["auto"], help="who passes over the weights")
    parser.add_argument("--all", action="store_true", help="fp32 and int8 history too")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="gloo ranks to share the largest size but one")
    parser.add_argument("--step", action="store_true", help="share of a SmolLM2 update")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads, median of {arguments.rounds} rounds (3 from 2e8 on)")
    rows = sizes_table(arguments)
    Path(__file__).with_name("results").joinpath("forecast.json").write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.ranks:
        ranks_table(arguments.ranks, int(1e8), arguments.rounds)
    if arguments.step:
        step_table()


if __name__ == "__main__":
    main()
