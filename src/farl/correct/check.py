"""Checks of corrector options; each says what was wrong, what is allowed and what to do."""

from __future__ import annotations

import math

from farl.errors import ConfigError


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuses a name that is not in a closed set."""
    if value not in allowed:
        raise ConfigError(f"corrector.{name}={value!r}: must be one of {', '.join(allowed)}")


def offsets(clip_low: float, clip_high: float) -> None:
    """Refuses clip offsets that do not leave 1 inside."""
    if not 0 <= clip_low <= 1:
        raise ConfigError(f"corrector.clip_low={clip_low}: must be in [0, 1], an offset below 1")
    if not clip_high >= 0:
        raise ConfigError(f"corrector.clip_high={clip_high}: must be 0 or more, an offset above 1")


def positive(**values: float | None) -> None:
    """Refuses numbers that are not finite and above 0; None passes."""
    for name, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"corrector.{name}={value}: must be above 0 and finite")


def not_negative(**values: float | None) -> None:
    """Refuses numbers below 0; None passes."""
    for name, value in values.items():
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"corrector.{name}={value}: must be 0 or more and finite")


def band(floor: float | None, cap: float | None) -> None:
    """Refuses bands of a weight that leave out 1, the weight of on-policy tokens."""
    if floor is not None and not 0 <= floor <= 1:
        raise ConfigError(f"corrector.floor={floor}: must be in [0, 1], an absolute bound below on-policy weights")
    if cap is not None and not cap >= 1:
        raise ConfigError(f"corrector.cap={cap}: must be 1 or more, an absolute bound above on-policy weights")


def dual(dual_clip: float | None) -> None:
    """Refuses a dual clip that would clip on-policy tokens."""
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"corrector.dual_clip={dual_clip}: must be above 1; leave it out to turn it off")


def beyond_clip(ratio_cap: float | None, clip_high: float) -> None:
    """Refuses a cap of the ratio inside the clip; None passes."""
    if ratio_cap is not None and not ratio_cap >= 1 + clip_high:
        raise ConfigError(
            f"corrector.ratio_cap={ratio_cap}: must be 1 + clip_high = {1 + clip_high} or more; it bounds what the "
            "clip leaves free"
        )


def above_one(**values: float | None) -> None:
    """Refuses caps of a ratio that would touch on-policy tokens; None passes."""
    for name, value in values.items():
        if value is not None and not value > 1:
            raise ConfigError(f"corrector.{name}={value}: must be above 1, the ratio of on-policy tokens")


def at_most_one(**values: float) -> None:
    """Refuses lower bounds of a ratio that would touch on-policy tokens."""
    for name, value in values.items():
        if not value <= 1:
            raise ConfigError(f"corrector.{name}={value}: must be 1 or less, the ratio of on-policy tokens")


def ordered(minimum: float, *pairs: tuple[str, float]) -> None:
    """Refuses ends of a range that go down or begin below a minimum."""
    previous, before = f"{minimum}", minimum
    for name, value in pairs:
        if not value >= before:
            raise ConfigError(f"corrector.{name}={value}: must be {previous} or more")
        previous, before = f"corrector.{name}={value}", value


def only(name: str, value: object, where: str) -> None:
    """Refuses an option that has no effect beside the others."""
    if value is not None:
        raise ConfigError(f"corrector.{name}={value}: only with {where}; leave it out")
