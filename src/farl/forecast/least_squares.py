"""The multi-lag predictor: weighted ridge least squares under consistency constraints.

Reads a `GramBand` and returns coefficients; the solve is a (K+p) x (K+p) system in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farl.forecast.aim import Aim
from farl.forecast.gram import GramBand


def consistency_system(lags: int, order: int, aim: Aim) -> tuple[Tensor, Tensor]:
    """Constraints that make a forecast exact on polynomial displacement sequences of degree < p.

        sum_k a[k] (1-k)^q = sum_{i=1..h} i^q      q = 0 .. p-1

    Args:
        lags: K.
        order: p, at most K.
        aim: gives the right-hand side, for real h by Faulhaber's polynomials.

    Returns:
        `C` float64 [p, K] and `c` float64 [p].

    Source: the method, section 2; real h: section 3b, point 6.
    """
    nodes = [float(1 - k) for k in range(1, lags + 1)]
    rows = [[node**q for node in nodes] for q in range(order)]
    sums = [aim.power_sum(q) for q in range(order)]
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(sums, dtype=torch.float64)


def minimum_norm(lags: int, order: int, aim: Aim) -> Tensor:
    """The shortest consistent vector, `C' (C C')^-1 c`, float64 [K]; least noise amplification."""
    matrix_pK, rhs_p = consistency_system(lags, order, aim)
    vector_K: Tensor = matrix_pK.T @ torch.linalg.solve(matrix_pK @ matrix_pK.T, rhs_p)
    return vector_K


def normal_equations(
    gram: GramBand, *, version: int, shares: Sequence[float], lags: int, forgetting: float, window: int
) -> tuple[Tensor, Tensor, float]:
    """Sums of the fit over the recent past, as known at `version`.

        G = sum_b lambda^(t-b-r) <D[b+1-k], D[b+1-l]>,   g = sum_b lambda^(t-b-r) <T[b], D[b+1-k]>

    over bases `b` whose target `T[b] = sum_i w_i D[b+i]` of reach r is known.

    Args:
        gram: inner products; rows newer than `version` are not read.
        version: t, the version the fit is made at.
        shares: w of the aim.
        lags: K.
        forgetting: lambda.
        window: most targets used.

    Returns:
        `G` float64 [K, K], `g` float64 [K], and the discounted number of targets.
    """
    reach, rows = len(shares), gram.rows
    normal = [[0.0] * lags for _ in range(lags)]
    cross = [0.0] * lags
    count = 0.0
    for target in range(version, max(version - window, 0), -1):
        base = target - reach
        if not gram.covers(base + 1 - lags, target):
            break
        weight = forgetting ** (version - target)
        newest_row = gram.newest - base - reach
        for k in range(lags):
            row = rows[newest_row + reach + k]
            # D[base+i] is in row newest_row + reach - i, and D[base-k] lies i + k updates before it
            cross[k] += weight * sum(
                w * rows[newest_row + reach - i][i + k] for i, w in enumerate(shares, start=1) if w
            )
            for m in range(k, lags):
                normal[k][m] += weight * row[m - k]
        count += weight
    for k in range(lags):
        for m in range(k):
            normal[k][m] = normal[m][k]
    return torch.tensor(normal, dtype=torch.float64), torch.tensor(cross, dtype=torch.float64), count


def solve(
    normal_KK: Tensor,
    cross_K: Tensor,
    *,
    pull_K: Tensor,
    ridge: float,
    constraints: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Coefficients that minimise the fit plus a pull, under constraints if there are any.

        minimise  a'G a - 2 a.g + rho ||a - a0||^2   s.t.  C a = c

    `rho = ridge * trace(G) / K` scales with the displacements, so scaling those scales the forecast.

    Args:
        normal_KK: G.
        cross_K: g.
        pull_K: a0.
        ridge: weight of the pull relative to the mean diagonal of G.
        constraints: `C` [p, K] and `c` [p], or None.

    Returns:
        float64 [K]; `a0` when no displacement has moved.

    Source: the method, section 2.
    """
    lags = len(cross_K)
    scale = float(normal_KK.trace()) / lags
    if not scale > 0:
        return pull_K
    left_KK = normal_KK / scale + ridge * torch.eye(lags, dtype=torch.float64)
    right_K = cross_K / scale + ridge * pull_K
    if constraints is None:
        return _lstsq(left_KK, right_K)
    matrix_pK, rhs_p = constraints
    corner = torch.zeros(len(rhs_p), len(rhs_p), dtype=torch.float64)
    kkt = torch.cat([torch.cat([left_KK, matrix_pK.T], 1), torch.cat([matrix_pK, corner], 1)])
    return _lstsq(kkt, torch.cat([right_K, rhs_p]))[:lags]


def _lstsq(matrix: Tensor, rhs: Tensor) -> Tensor:
    """Minimum-norm solution; well defined for the singular systems that collinear displacements give."""
    solution: Tensor = torch.linalg.lstsq(matrix, rhs.unsqueeze(1), driver="gelsd").solution
    return solution.squeeze(1)
