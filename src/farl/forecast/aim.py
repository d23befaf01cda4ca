"""Where a forecast aims: a real number of updates ahead, or a distribution over several.

The weights of a distribution's mean are `theta[t] + sum_i w_i D[t+i]` with `w_i = P(h >= i)`, and a fractional
horizon is the point between two versions, so both are a vector of shares of the coming updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from numbers import Real

from farl.errors import ConfigError

Horizon = float | Mapping[float, float]
"""Updates ahead: 1, 2.5, or `{1: 0.7, 2: 0.3}` where the lag varies (counts will do, they are normalised)."""


@dataclass(frozen=True)
class Aim:
    """A checked horizon.

    Attributes:
        points: pairs of (updates ahead, probability), ascending; the probabilities add to 1.
    """

    points: tuple[tuple[float, float], ...]

    @property
    def horizon(self) -> float:
        """h, the mean of updates ahead; an int when it is whole."""
        mean = sum(h * p for h, p in self.points)
        return int(mean) if mean == int(mean) else mean

    @property
    def reach(self) -> int:
        """Updates after which the last aimed-at version exists."""
        return math.ceil(self.points[-1][0])

    @property
    def shares(self) -> tuple[float, ...]:
        """w_i of the coming updates i = 1 .. reach: `E[min(max(h - i + 1, 0), 1)]`."""
        return tuple(sum(p * min(max(h - i, 0.0), 1.0) for h, p in self.points) for i in range(self.reach))

    def power_sum(self, q: int) -> float:
        """`E[sum_{i=1..h} i^q]`, the right-hand side of the consistency conditions, for real h."""
        return sum(p * _faulhaber(q, h) for h, p in self.points)


def aim_of(horizon: Horizon | Aim) -> Aim:
    """Checks a horizon.

    Raises:
        ConfigError: for a horizon that is negative, not finite, not a number, or a distribution without mass.
    """
    if isinstance(horizon, Aim):
        return horizon
    points = horizon if isinstance(horizon, Mapping) else {horizon: 1.0}
    for h, p in points.items():
        if isinstance(h, bool) or not isinstance(h, Real) or not 0 <= h < math.inf:
            raise ConfigError(f"horizon={h!r}: must be a number of updates, 0 or more; 0 means exact weights")
        if not isinstance(p, Real) or not 0 <= p < math.inf:
            raise ConfigError(f"horizon={dict(points)!r}: the share of {h} is {p!r}; shares must be 0 or more")
    total = sum(points.values())
    if not total > 0:
        raise ConfigError(f"horizon={dict(points)!r}: no share is above 0; give at least one lag a positive share")
    return Aim(tuple(sorted((_plain(h), float(p / total)) for h, p in points.items() if p > 0)))


def require_reach(horizon: Horizon, max_horizon: int) -> Aim:
    """A checked horizon that history was sized for.

    Raises:
        ConfigError: as `aim_of`, and for a horizon above `max_horizon`.
    """
    aim = aim_of(horizon)
    if aim.reach > max_horizon:
        raise ConfigError(
            f"horizon={horizon!r}: must be from 0 to max_horizon={max_horizon} updates; raise max_horizon to "
            "look further"
        )
    return aim


def _plain(number: float) -> float:
    """A number of any library as int or float, which JSON knows."""
    value = float(number)
    return int(value) if value == int(value) else value


def horizon_key(horizon: float) -> float:
    """A horizon to the nearest half update, what evidence and scores are kept by.

    So a lag that differs from dispatch to dispatch adds to the same few records.
    """
    return _plain(max(round(2 * horizon) / 2, 0.5))


@cache
def _bernoulli(n: int) -> Fraction:
    """Bernoulli number with `B_1 = +1/2`."""
    if n == 0:
        return Fraction(1)
    total = sum((math.comb(n + 1, k) * (Fraction(-1, 2) if k == 1 else _bernoulli(k)) for k in range(n)), Fraction(0))
    value = -total / (n + 1)
    return Fraction(1, 2) if n == 1 else value


def _faulhaber(q: int, h: float) -> float:
    """The polynomial that equals `1^q + 2^q + .. + h^q` at whole h (Faulhaber's formula)."""
    terms = (float(math.comb(q + 1, j) * _bernoulli(j)) * h ** (q + 1 - j) for j in range(q + 1))
    return sum(terms) / (q + 1)
