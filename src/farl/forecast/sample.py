"""The entries on which inner products are formed: a fixed, stratified sample of the weights, and their metric.

Coefficients and scores are ratios of sums over all entries, and a million entries give them to a fraction of a
percent, so no update has to read the whole history again. Models below the limit are taken whole, and every figure is
exact.
Suffixes: N entries of a leaf, S sampled entries, R displacements held for them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from farl.forecast.config import Metric

BLOCK = 64
"""Neighbouring entries are sampled together, as rows of a leaf: a cache line costs the same as one entry of it."""
_BIN_SHIFT = 19
"""Bits of a float32 dropped for the histogram: 4096 bins, sixteen to the octave."""
_MIN_SHARP = 1024
"""Fewer sharp entries than this would fit a handful of coefficients to noise; small models take more of themselves."""
_NUM_BINS = 1 << (31 - _BIN_SHIFT)

Reduce = Callable[[Tensor], Tensor]
"""Adds a float64 tensor over all shards of the weights; the identity where they are not sharded."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Which entries are sampled.

    Attributes:
        blocks: which blocks of each leaf, int64; None for all of it.
        spans: where each leaf's entries lie in the joined vector [S].
        density_S: entries of the leaf that each sampled one stands for, float32; divided by the number of ranks that
            hold the same copy.
        replicas: that number, where it is not 1.
    """

    blocks: Mapping[str, Tensor | None]
    spans: Mapping[str, slice]
    density_S: Tensor
    replicas: Mapping[str, int]

    @property
    def num_entries(self) -> int:
        """S."""
        return len(self.density_S)

    def share(self, name: str) -> float:
        """What this rank's sums over a leaf count for, `1 / replicas`."""
        return 1 / self.replicas.get(name, 1)

    def gather(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """The sampled entries of flat leaves, float32 [S] on the sample's device; zero where a leaf is not given."""
        out_S = torch.zeros_like(self.density_S)
        for name, leaf_N in leaves.items():
            blocks = self.blocks[name]
            drawn = leaf_N if blocks is None else _as_blocks(leaf_N).index_select(0, blocks).view(-1)
            out_S[self.spans[name]] = drawn.to(out_S.device)
        return out_S

    def part(self, name: str) -> slice | Tensor:
        """The sampled entries of a leaf, as an index into it."""
        blocks = self.blocks[name]
        if blocks is None:
            return slice(None)
        return (blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=blocks.device)).view(-1)


def _as_blocks(leaf_N: Tensor) -> Tensor:
    """The whole blocks of a flat leaf as rows; what does not fill a block at the end is never sampled."""
    count = leaf_N.numel() // BLOCK
    return leaf_N[: count * BLOCK].view(count, BLOCK)


def choose_sample(
    leaves: Mapping[str, Tensor], *, max_entries: int, total: float, replicas: Mapping[str, int]
) -> Sample:
    """Spreads the sample over all leaves in proportion to their size, one block at random in each stratum.

    Args:
        leaves: flat weights, or shards of them.
        max_entries: about the size of the sample over all shards; a small leaf gives at least a block.
        total: entries of all shards together, copies counted once.
        replicas: ranks that hold the same copy of a leaf, where it is not 1.

    Returns:
        The sample, a function of leaf names and sizes alone.
    """
    fraction = max_entries / total
    chosen: dict[str, Tensor | None] = {}
    spans: dict[str, slice] = {}
    densities, start = [], 0
    device = next(iter(leaves.values())).device
    for name, leaf_N in leaves.items():
        size = leaf_N.numel()
        blocks = max(1, round(fraction * size / BLOCK))
        if fraction >= 1 or blocks * BLOCK >= size:
            chosen[name], count = None, size
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            stride = size // BLOCK / blocks
            room = torch.rand(blocks, generator=generator, dtype=torch.float64) * (stride - 1)
            chosen[name] = (torch.arange(blocks, dtype=torch.float64) * stride + room).long().to(leaf_N.device)
            count = blocks * BLOCK
        spans[name] = slice(start, start + count)
        densities.append(torch.full((count,), size / max(count, 1) / replicas.get(name, 1), device=device))
        start += count
    return Sample(blocks=chosen, spans=spans, density_S=torch.cat(densities), replicas=replicas)


def metric_weight(
    metric: Metric, curvature_S: Tensor | None, density_S: Tensor, *, sharp_fraction: float, reduce: Reduce
) -> Tensor:
    """Elementwise weight of the inner product in which coefficients are fitted, times the sample's density.

    Args:
        metric: "euclidean" is 1; "adam" is the curvature; "sharp" is 1 on the entries of largest curvature, else 0.
        curvature_S: second moment of the gradient; without one every metric is Euclidean.
        density_S: of the sample.
        sharp_fraction: share of entries that count as sharp.
        reduce: adds over shards, so that all ranks draw the line at the same curvature.

    Returns:
        float32 [S].

    Source: the method, section 3b, point 3 ("adam"); docs/experiments.md ("sharp").
    """
    if metric == "euclidean" or curvature_S is None:
        return density_S
    if metric == "adam":
        return density_S * curvature_S
    bins_S = curvature_S.nan_to_num(0.0, 0.0, 0.0).clamp_(min=0).view(torch.int32) >> _BIN_SHIFT
    counts = torch.bincount(bins_S, weights=density_S.double(), minlength=_NUM_BINS)
    counts = reduce(counts)
    above = counts.flip(0).cumsum(0).flip(0)
    wanted = max(sharp_fraction * float(above[0]), _MIN_SHARP)
    line = max(int((above >= wanted).sum()) - 1, 0)
    return density_S * (bins_S >= line)


def products(rows_RS: Tensor, newest_S: Tensor, weight_S: Tensor) -> Tensor:
    """Weighted inner products of the newest displacement with those held and with itself, float64 [R + 1]."""
    weighted_S = newest_S * weight_S
    own = torch.dot(newest_S, weighted_S).reshape(1)
    return torch.cat([rows_RS @ weighted_S, own]).double()
