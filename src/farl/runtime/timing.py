"""How much of the wall time learner and workers computed at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[float, float]


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Union of intervals as disjoint ones in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def length(intervals: Sequence[Interval]) -> float:
    """Total length of the union, seconds."""
    return sum(end - start for start, end in merged(intervals))


def common(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Seconds that lie in both unions."""
    return length(a) + length(b) - length([*a, *b])


@dataclass(frozen=True, kw_only=True)
class OverlapReport:
    """Shares of a stretch of wall time.

    Attributes:
        wall_s: the stretch, without what was left out of it (evaluations).
        train_s: the learner computed.
        generate_s: at least one worker computed.
        both_s: both did.
    """

    wall_s: float
    train_s: float
    generate_s: float
    both_s: float

    @property
    def overlap_fraction(self) -> float:
        """Share of the wall time in which learner and workers computed at once."""
        return self.both_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def step_ratio(self) -> float:
        """Wall time over the longer of training and generation; 1 is perfect overlap."""
        longest = max(self.train_s, self.generate_s)
        return self.wall_s / longest if longest > 0 else 1.0


class Timeline:
    """Collects what learner and workers did, on the machine's monotonic clock."""

    def __init__(self) -> None:
        self.train: list[Interval] = []
        self.generate: list[Interval] = []
        self.left_out: list[Interval] = []

    def report(self) -> OverlapReport:
        """Shares between the start of the first update and the end of the last one.

        Starting up and filling the pipeline are not steps; neither are the evaluations in `left_out`, nor what
        workers did meanwhile.
        """
        if not self.train:
            return OverlapReport(wall_s=0.0, train_s=0.0, generate_s=0.0, both_s=0.0)
        start_s, end_s = self.train[0][0], self.train[-1][1]
        train = _clip(self.train, start_s, end_s)
        left_out = _clip(self.left_out, start_s, end_s)
        generate = _without(_clip(self.generate, start_s, end_s), left_out)
        return OverlapReport(
            wall_s=end_s - start_s - length(left_out),
            train_s=length(train),
            generate_s=length(generate),
            both_s=common(train, generate),
        )


def _clip(intervals: Sequence[Interval], start_s: float, end_s: float) -> list[Interval]:
    return [(max(a, start_s), min(b, end_s)) for a, b in intervals if b > start_s and a < end_s]


def _without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """The union of intervals, less the holes."""
    rest = merged(intervals)
    for low, high in holes:
        rest = [(a, b) for start, end in rest for a, b in ((start, min(end, low)), (max(start, high), end)) if a < b]
    return rest
