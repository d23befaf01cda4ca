"""What a forecast costs: observe, plan and stream against moving the same bytes, side by side in one run.

    python benchmarks/forecast.py --parameters 30e6 --lags 2 4 --threads 1

`copy` moves one fp32 set of weights (reads N words, writes N). `observe` must read theta[t], theta[t-1] and C
displacements and write theta[t] and one displacement, `(C + 4) N` words; `stream` reads theta[t] and K displacements,
writes the result and, here, delivers it by one copy, `(K + 4) N`. A copy is `2 N`, so the floors are `(C + 4) / 2` and
`(K + 4) / 2` copies.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from farl.forecast import ForecastConfig, init, observe, plan, stream


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(num_parameters: int, lags: int, history: str, rounds: int) -> dict[str, float]:
    leaves = [(f"leaf{i}", torch.randn(num_parameters // 30)) for i in range(30)]
    target = [torch.empty_like(leaf) for _, leaf in leaves]
    config = ForecastConfig(rule="least_squares", lags=lags, history_dtype=history)
    state = init(leaves, config)
    times: dict[str, list[float]] = {"copy": [], "observe": [], "plan": [], "stream": []}
    for i in range(rounds + lags + 1):
        for _, leaf in leaves:
            leaf.add_(1e-5 * torch.randn(1))
        took = {"copy": timed(lambda: [b.copy_(a) for (_, a), b in zip(leaves, target, strict=True)])}
        start = time.perf_counter()
        state, _ = observe(state, leaves)
        took["observe"] = time.perf_counter() - start
        start = time.perf_counter()
        forecast = plan(state, 1)
        took["plan"] = time.perf_counter() - start
        outputs = iter(target)
        took["stream"] = timed(lambda s=state, f=forecast, o=outputs: [next(o).copy_(w) for _, w in stream(s, f)])
        if i > lags:
            for name, value in took.items():
                times[name].append(value)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=30e6)
    parser.add_argument("--lags", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.parameters:.0f} parameters, {arguments.threads} threads, median of {arguments.rounds} rounds")
    print("| history | lags | copy ms | observe (floor) | plan | stream (floor) | all (floor) |")
    print("|---|---|---|---|---|---|---|")
    for history in ("float32", "bfloat16"):
        for lags in arguments.lags:
            took = measure(int(arguments.parameters), lags, history, arguments.rounds)
            copy = took["copy"]
            size = 0.5 if history == "bfloat16" else 1.0
            observe_floor, stream_floor = (3 + size * (lags + 1)) / 2, (4 + size * lags) / 2
            total = took["observe"] + took["plan"] + took["stream"]
            print(
                f"| {history} | {lags} | {copy * 1e3:.1f} | {took['observe'] / copy:.1f} ({observe_floor:.1f}) | "
                f"{took['plan'] / copy:.2f} | {took['stream'] / copy:.1f} ({stream_floor:.1f}) | {total / copy:.1f} "
                f"({observe_floor + stream_floor:.1f}) |"
            )


if __name__ == "__main__":
    main()
