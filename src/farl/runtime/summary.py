"""The figures a run ends with, computed from its own metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from farl.runtime.timing import OverlapReport


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came of a run. Means are over updates; those with `probe` in the name over forecast trajectories.

    Attributes:
        finished: False if it was stopped early.
        num_updates: optimizer steps made.
        accuracy_before: on held-out problems, exact weights.
        accuracy_after: the same at the end; None if the run was stopped.
        reward_curve: mean reward of each batch.
        error_ratio: mean prequential `forecast/error_ratio`.
        kl_probe_nats: mean KL of the behaviour policy to the learner on probed tokens.
        kl_stale_nats: what stale weights would have had on the same tokens.
        ess_probe_fraction: mean effective sample size on probed sequences.
        ess_stale_fraction: what stale weights would have had.
        held_fraction: share of updates whose forecast was held.
        overlap_fraction: share of wall time in which learner and workers computed at once.
        step_ratio: wall time over the longer of training and generation.
        train_s: seconds the learner computed.
        generate_s: seconds at least one worker computed.
        num_restarts: workers replaced.
        num_skipped: updates skipped for non-finite gradients.
        elapsed_s: wall time, all sessions of a resumed run.
    """

    finished: bool
    num_updates: int
    accuracy_before: float
    accuracy_after: float | None
    reward_curve: tuple[float, ...]
    error_ratio: float
    kl_probe_nats: float
    kl_stale_nats: float
    ess_probe_fraction: float
    ess_stale_fraction: float
    held_fraction: float
    overlap_fraction: float
    step_ratio: float
    train_s: float
    generate_s: float
    num_restarts: int
    num_skipped: int
    elapsed_s: float

    @property
    def kl_ratio(self) -> float:
        """Mean KL with the forecast over mean KL without it, on the same tokens; NaN without a probe."""
        return self.kl_probe_nats / self.kl_stale_nats if self.kl_stale_nats > 0 else math.nan

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, NaN as None."""
        data = asdict(self) | {"kl_ratio": self.kl_ratio, "reward_curve": list(self.reward_curve)}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}


def summarise(
    history: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    timing: OverlapReport,
    *,
    finished: bool,
    num_restarts: int,
    num_skipped: int,
    elapsed_s: float,
) -> Summary:
    """Computes the summary from per-update metrics; batches dispatched at version 0 have no lag to probe."""
    lagged = [m for m in history if m.get("lag/fresh_versions", 0) > 0]
    rewards = {m["batch"]: m["reward/mean"] for m in history}
    return Summary(
        finished=finished,
        num_updates=int(history[-1]["update"]) if history else 0,
        accuracy_before=evaluations[0]["accuracy"] if evaluations else math.nan,
        accuracy_after=evaluations[-1]["accuracy"] if finished else None,
        reward_curve=tuple(rewards.values()),
        error_ratio=_mean(history, "forecast/error_ratio"),
        kl_probe_nats=_mean(lagged, "policy/kl_probe_nats"),
        kl_stale_nats=_mean(lagged, "policy/kl_stale_nats"),
        ess_probe_fraction=_mean(lagged, "policy/ess_probe_fraction"),
        ess_stale_fraction=_mean(lagged, "policy/ess_stale_fraction"),
        held_fraction=sum(m["forecast/damping"] == 0 for m in lagged) / len(lagged) if lagged else 0.0,
        overlap_fraction=timing.overlap_fraction,
        step_ratio=timing.step_ratio,
        train_s=timing.train_s,
        generate_s=timing.generate_s,
        num_restarts=num_restarts,
        num_skipped=num_skipped,
        elapsed_s=elapsed_s,
    )


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [float(v) for row in rows if (v := row.get(key)) is not None and math.isfinite(v)]
    return sum(values) / len(values) if values else math.nan
