"""The named correctors: each a factory from its options to a composed `Corrector`.

Adding one is a factory here and a row in `CORRECTORS`, a golden entry, and a row in `docs/sources.md`. Defaults are
those of the authors. An option that a corrector does not have is refused, not ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from farl.correct.base import Corrector, Need, SurrogateFunction, TreatmentFunction
from farl.correct.ratio import Level
from farl.correct.reduce import REDUCTIONS, Denominator, Reduction
from farl.correct.surrogate import clipped, policy_gradient
from farl.correct.treat import importance_weight
from farl.errors import ConfigError, unknown_name

Anchor = Literal["behaviour", "proximal"]
CapAction = Literal["mask", "clamp"]


@dataclass(frozen=True, kw_only=True)
class CorrectorConfig:
    """A corrector and its options; None takes the authors' default.

    Attributes:
        name: a name of `CORRECTORS`.
        form: of `none`: "ratio" or "score".
        anchor: policy in the clipped ratio's denominator: "behaviour" or "proximal".
        clip_low: offset of the lower clip from 1.
        clip_high: offset of the upper clip from 1.
        dual_clip: bound on the loss of negative advantages, above 1; off by default.
        base: what a weight multiplies: "ppo" or "policy_gradient".
        level: unit of the weight: "token" or "sequence".
        cap: absolute bound of the weight.
        cap_action: beyond the cap, "mask" drops the token, "clamp" sets the weight to the cap.
        reduction: a name of `farl.correct.reduce.REDUCTIONS`.
        denominator: "original" counts dropped tokens, "kept" does not.
        horizon: H of `sequence_mean_token_sum_norm`.
    """

    name: str = "none"
    form: Literal["ratio", "score"] | None = None
    anchor: Anchor | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    base: Literal["ppo", "policy_gradient"] | None = None
    level: Level | None = None
    cap: float | None = None
    cap_action: CapAction | None = None
    reduction: Reduction | None = None
    denominator: Denominator | None = None
    horizon: int | None = None

    def __post_init__(self) -> None:
        make_corrector(self)


def none(*, form: str = "ratio", reduction: Reduction = "token_mean", horizon: int | None = None) -> Corrector:
    """Plain policy gradient: samples are taken as if the learner had drawn them."""
    _one_of("form", form, ("ratio", "score"))
    return Corrector(
        name="none", needs=frozenset(), surrogate=policy_gradient(form), reduction=reduction, horizon=horizon
    )


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """PPO clip of the ratio to the behaviour policy (or to the proximal one)."""
    return Corrector(
        name="ppo",
        needs=_anchor_needs(anchor),
        surrogate=_clipped(anchor, clip_low, clip_high, dual_clip),
        reduction=reduction,
        horizon=horizon,
    )


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """DAPO's clip-higher: PPO clip with a wider upper bound and a token mean."""
    clipping = ppo(
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        anchor=anchor,
        reduction=reduction,
        horizon=horizon,
    )
    return replace(clipping, name="dapo")


def decoupled_ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    level: Level = "token",
    cap: float = 5.0,
    cap_action: CapAction = "mask",
    reduction: Reduction = "token_mean",
    denominator: Denominator = "original",
    horizon: int | None = None,
) -> Corrector:
    """Decoupled PPO: clip against the proximal policy, weighted by proximal / behaviour with a cap."""
    return Corrector(
        name="decoupled_ppo",
        needs=_weight_needs({Need.PROXIMAL}, denominator),
        surrogate=_clipped("proximal", clip_low, clip_high, dual_clip),
        treatments=(_weight("proximal", level, cap, cap_action),),
        reduction=reduction,
        denominator_rule=denominator,
        horizon=horizon,
    )


def tis(
    *,
    base: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: Level = "token",
    cap: float = 2.0,
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """Truncated importance sampling: min(ratio, cap) times PPO on the proximal policy, or times plain gradient."""
    _one_of("base", base, ("ppo", "policy_gradient"))
    on_ppo = base == "ppo"
    return Corrector(
        name="tis",
        needs=frozenset({Need.PROXIMAL} if on_ppo else ()),
        surrogate=_clipped("proximal", clip_low, clip_high, None) if on_ppo else policy_gradient("score"),
        treatments=(_weight("proximal" if on_ppo else "learner", level, cap, "clamp"),),
        reduction=reduction,
        horizon=horizon,
    )


CORRECTORS: Mapping[str, Callable[..., Corrector]] = {
    "none": none,
    "ppo": ppo,
    "dapo": dapo,
    "decoupled_ppo": decoupled_ppo,
    "tis": tis,
}


def make_corrector(config: CorrectorConfig) -> Corrector:
    """Builds the corrector a config names.

    Raises:
        ConfigError: for an unknown name, an option the corrector does not have, or a value that cannot work.
    """
    if config.name not in CORRECTORS:
        raise unknown_name("corrector.name", config.name, CORRECTORS)
    factory = CORRECTORS[config.name]
    known = inspect.signature(factory).parameters
    options = {f.name: v for f in fields(config) if f.name != "name" and (v := getattr(config, f.name)) is not None}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                f"corrector.{name}={value!r}: {config.name} has no such option; it has {', '.join(known)}"
            )
    if options.get("reduction", "token_mean") not in REDUCTIONS:
        raise unknown_name("corrector.reduction", str(options["reduction"]), REDUCTIONS)
    _one_of("denominator", str(options.get("denominator", "original")), ("original", "kept"))
    if "horizon" in options and options["horizon"] < 1:
        raise ConfigError(f"corrector.horizon={options['horizon']}: must be 1 token or more")
    if options.get("base") == "policy_gradient" and options.keys() & {"clip_low", "clip_high"}:
        raise ConfigError("corrector.clip_low, clip_high: base='policy_gradient' does not clip; leave them out")
    return factory(**options)


def _clipped(anchor: str, clip_low: float, clip_high: float, dual_clip: float | None) -> SurrogateFunction:
    _one_of("anchor", anchor, ("behaviour", "proximal"))
    if not 0 <= clip_low <= 1:
        raise ConfigError(f"corrector.clip_low={clip_low}: must be in [0, 1], an offset below 1")
    if not clip_high >= 0:
        raise ConfigError(f"corrector.clip_high={clip_high}: must be 0 or more, an offset above 1")
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"corrector.dual_clip={dual_clip}: must be above 1; leave it out to turn it off")
    return clipped(anchor, clip_low, clip_high, dual_clip)


def _weight(numerator: str, level: Level, cap: float, cap_action: str) -> TreatmentFunction:
    _one_of("level", level, ("token", "sequence"))
    _one_of("cap_action", cap_action, ("mask", "clamp"))
    if not cap > 0:
        raise ConfigError(f"corrector.cap={cap}: must be above 0, an absolute bound of the weight")
    return importance_weight(numerator, level=level, cap=cap, cap_action=cap_action)


def _anchor_needs(anchor: str) -> frozenset[Need]:
    return frozenset({Need.PROXIMAL} if anchor == "proximal" else ())


def _weight_needs(needs: set[Need], denominator: str) -> frozenset[Need]:
    return frozenset(needs | ({Need.BATCH_STATISTICS} if denominator == "kept" else set()))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"corrector.{name}={value!r}: must be one of {', '.join(allowed)}")
