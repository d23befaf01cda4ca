"""Inner products of recent displacements, kept as scalars after their tensors are gone.

Row j holds `<D[j], D[j-s]>` for s = 0 .. width-1. Every fit and every score of the method reads these
numbers and nothing else; the tensors live in `state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from farl.errors import StateError


@dataclass(frozen=True, kw_only=True)
class GramBand:
    """A band of the Gram matrix of displacements, newest update first.

    Attributes:
        newest: version of the newest displacement (update j makes version j); 0 before any.
        rows: `rows[i][s] = <D[newest-i], D[newest-i-s]>` in float64; a row is shorter where history ended.
    """

    newest: int = 0
    rows: tuple[tuple[float, ...], ...] = ()

    @property
    def oldest(self) -> int:
        """Version of the oldest displacement with a row; `newest + 1` when there is none."""
        return self.newest - len(self.rows) + 1

    def push(self, row: Sequence[float], *, max_rows: int) -> GramBand:
        """Returns the band with one more update, the oldest rows beyond `max_rows` dropped."""
        return GramBand(newest=self.newest + 1, rows=(tuple(row), *self.rows[: max_rows - 1]))

    def inner(self, i: int, j: int) -> float:
        """`<D[i], D[j]>`.

        Raises:
            StateError: if the pair is outside the band that was kept.
        """
        late, early = max(i, j), min(i, j)
        age = self.newest - late
        if 0 <= age < len(self.rows) and late - early < len(self.rows[age]):
            return self.rows[age][late - early]
        raise StateError(f"<D[{i}], D[{j}]> was not kept: rows {self.oldest}..{self.newest}, band too narrow or short")

    def covers(self, oldest: int, newest: int) -> bool:
        """Whether every inner product among the updates `oldest .. newest` was kept.

        The newest row is the widest one, and rows older than `oldest` do not matter, so two comparisons do.
        """
        if newest > self.newest:
            return False
        return newest < oldest or (oldest >= self.oldest and newest - oldest < len(self.rows[0]))

    def target(self, *, base: int, shares: Sequence[float]) -> list[tuple[float, int]]:
        """The displacements that make up `T = sum_i w_i D[base+i]`, as (share, version)."""
        return [(w, base + i) for i, w in enumerate(shares, start=1) if w != 0.0]

    def squared_error(
        self, coefficients: Sequence[float], *, base: int, shares: Sequence[float]
    ) -> tuple[float, float]:
        """Realised squared residual of a forecast, and of stale weights, from scalars alone.

            r^2 = ||T||^2 - 2 a.g + a'G a,   T = sum_i w_i D[base+i],   g_k = <T, D[base+1-k]>

        Args:
            coefficients: a, newest displacement first.
            base: version the forecast started from.
            shares: w of the aim; the last version of its reach must have been observed.

        Returns:
            `(r^2, ||T||^2)`, both at least 0.

        Source: the method, section 2, "scoring is free".
        """
        ahead = self.target(base=base, shares=shares)
        terms = [(a, base + 1 - k) for k, a in enumerate(coefficients, start=1) if a != 0.0]
        stale = sum(v * w * self.inner(i, j) for v, i in ahead for w, j in ahead)
        cross = sum(a * w * self.inner(i, j) for a, j in terms for w, i in ahead)
        own = sum(a * b * self.inner(i, j) for a, i in terms for b, j in terms)
        return max(stale - 2 * cross + own, 0.0), max(stale, 0.0)

    def scaled(self, factor_of: Callable[[int], float]) -> GramBand:
        """The band of `factor_of(j) * D[j]`: with `1 / lr` of each update, displacements at unit learning rate."""
        rows = []
        for i, row in enumerate(self.rows):
            version = self.newest - i
            own = factor_of(version)
            rows.append(tuple(own * factor_of(version - s) * x for s, x in enumerate(row)))
        return GramBand(newest=self.newest, rows=tuple(rows))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` inverts it exactly."""
        return {"newest": self.newest, "rows": [list(row) for row in self.rows]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GramBand:
        """Inverse of `to_json`."""
        return cls(newest=data["newest"], rows=tuple(tuple(row) for row in data["rows"]))
