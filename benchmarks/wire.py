"""What moving weights between processes costs: send and receive against a plain copy of the same bytes.

    python benchmarks/wire.py --parameters 30e6

`send` writes the payload and reads it once for the checksum; `receive` reads it for the checksum and once more for the
copy into the sampler.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from farl.core.types import PolicyStamp
from farl.wire import SharedMemoryReceiver, SharedMemoryTransport, layout_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=30e6)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    leaves = [(f"leaf{i}", torch.randn(int(arguments.parameters) // 30)) for i in range(30)]
    target = [torch.empty_like(leaf) for _, leaf in leaves]
    stamp = PolicyStamp(base_version=0, target_version=1, rule="copy", coefficients=(1.0,))
    print("| wire dtype | copy ms | send / copy | receive / copy |")
    print("|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        transport = SharedMemoryTransport(layout_of([(n, t.shape) for n, t in leaves], dtype=dtype))
        times: dict[str, list[float]] = {"copy": [], "send": [], "receive": []}
        for i in range(arguments.rounds + 1):
            marks = [time.perf_counter()]
            for (_, leaf), out in zip(leaves, target, strict=True):
                out.copy_(leaf)
            marks.append(time.perf_counter())
            descriptor = transport.send(i, stamp, leaves)
            marks.append(time.perf_counter())
            _, views = SharedMemoryReceiver().receive(descriptor)
            for (_, view), out in zip(views, target, strict=True):
                out.copy_(view)
            marks.append(time.perf_counter())
            transport.release(i)
            if i:
                for name, a, b in zip(times, marks[:-1], marks[1:], strict=True):
                    times[name].append(b - a)
        transport.close()
        copy, send, receive = (statistics.median(values) for values in times.values())
        print(f"| {dtype} | {copy * 1e3:.1f} | {send / copy:.1f} | {receive / copy:.1f} |")


if __name__ == "__main__":
    main()
