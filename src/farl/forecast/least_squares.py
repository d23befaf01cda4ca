"""The multi-lag predictor: weighted ridge least squares under consistency constraints.

Reads a `GramBand` and returns coefficients; the solve is a (K+p) x (K+p) system in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farl.forecast.config import Consistency
from farl.forecast.gram import GramBand


def consistency_system(lags: int, order: int, horizon: float) -> tuple[Tensor, Tensor]:
    """Constraints that make a forecast exact on polynomial displacement sequences of degree < p.

        sum_k a[k] (1-k)^q = sum_{i=1..h} i^q      q = 0 .. p-1

    Args:
        lags: K.
        order: p, at most K.
        horizon: h, a whole number of updates.

    Returns:
        `C` float64 [p, K] and `c` float64 [p].

    Source: the method, section 2.
    """
    nodes = [float(1 - k) for k in range(1, lags + 1)]
    rows = [[node**q for node in nodes] for q in range(order)]
    sums = [float(sum(i**q for i in range(1, int(horizon) + 1))) for q in range(order)]
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(sums, dtype=torch.float64)


def minimum_norm(lags: int, order: int, horizon: int) -> Tensor:
    """The shortest consistent vector, `C' (C C')^-1 c`, float64 [K]; least noise amplification."""
    matrix_pK, rhs_p = consistency_system(lags, order, horizon)
    vector_K: Tensor = matrix_pK.T @ torch.linalg.solve(matrix_pK @ matrix_pK.T, rhs_p)
    return vector_K


def normal_equations(
    gram: GramBand, *, version: int, horizon: int, lags: int, forgetting: float, window: int
) -> tuple[Tensor, Tensor, int]:
    """Sums of the fit over the recent past, as known at `version`.

        G = sum_j lambda^(t-j) <D[j-h+1-k], D[j-h+1-l]>,   g = sum_j lambda^(t-j) <T[j], D[j-h+1-k]>

    Args:
        gram: inner products; rows newer than `version` are not read.
        version: t, the version the fit is made at.
        horizon: h of the targets `T[j] = theta[j] - theta[j-h]`.
        lags: K.
        forgetting: lambda.
        window: most targets used.

    Returns:
        `G` float64 [K, K], `g` float64 [K], and how many targets entered.
    """
    normal = [[0.0] * lags for _ in range(lags)]
    cross = [0.0] * lags
    rows = gram.rows
    count = 0
    for j in range(version, max(version - window, 0), -1):
        if not gram.covers(j - horizon + 1 - lags, j):
            break
        weight = forgetting ** (version - j)
        row_j = gram.newest - j
        for k in range(lags):
            back = horizon + k
            cross[k] += weight * sum(rows[row_j + i][back - i] for i in range(horizon))
            row = rows[row_j + back]
            for m in range(k, lags):
                normal[k][m] += weight * row[m - k]
        count += 1
    for k in range(lags):
        for m in range(k):
            normal[k][m] = normal[m][k]
    return torch.tensor(normal, dtype=torch.float64), torch.tensor(cross, dtype=torch.float64), count


def solve(
    normal_KK: Tensor, cross_K: Tensor, *, horizon: int, order: int, consistency: Consistency, ridge: float
) -> Tensor:
    """Coefficients that minimise the fit plus the pull, under the constraints when they are hard.

        minimise  a'G a - 2 a.g + rho ||a - a0||^2   s.t.  C a = c   (hard only)

    `rho = ridge * trace(G) / K` scales with the displacements, so scaling those scales the forecast.
    `a0` is the minimum-norm consistent vector, or 0 with consistency "off".

    Returns:
        float64 [K]; `a0` when no displacement has moved.

    Source: the method, section 2.
    """
    lags = len(cross_K)
    pull_K = minimum_norm(lags, order, horizon) if consistency != "off" else torch.zeros(lags, dtype=torch.float64)
    scale = float(normal_KK.trace()) / lags
    if not scale > 0:
        return pull_K
    eye_KK = torch.eye(lags, dtype=torch.float64)
    left_KK = normal_KK / scale + ridge * eye_KK
    right_K = cross_K / scale + ridge * pull_K
    if consistency != "hard":
        return _lstsq(left_KK, right_K)
    matrix_pK, rhs_p = consistency_system(lags, order, horizon)
    corner = torch.zeros(order, order, dtype=torch.float64)
    kkt = torch.cat([torch.cat([left_KK, matrix_pK.T], 1), torch.cat([matrix_pK, corner], 1)])
    return _lstsq(kkt, torch.cat([right_K, rhs_p]))[:lags]


def _lstsq(matrix: Tensor, rhs: Tensor) -> Tensor:
    """Minimum-norm solution; well defined for the singular systems that collinear displacements give."""
    solution: Tensor = torch.linalg.lstsq(matrix, rhs.unsqueeze(1), driver="gelsd").solution
    return solution.squeeze(1)
