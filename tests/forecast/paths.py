"""Weight sequences with known displacements, and the slow twin of the multi-lag fit."""

import numpy as np
import torch
from torch import nn

from farl.forecast import ForecastConfig, Forecaster, aim_of, init, observe, plan, record, stream
from farl.forecast.plan import ALL
from farl.forecast.rules import View


def settings(**changes):
    """A config under which every figure is exact: displacements in fp32, plain inner products, every target counted."""
    return ForecastConfig(**{"history_dtype": "float32", "metric": "euclidean", **changes})


def leaves_of(vector):
    """Splits a vector into two leaves of different shapes."""
    return [("a", vector[:4].reshape(2, 2)), ("b", vector[4:])]


def polynomial_path(degree, length, *, size=9, seed=0):
    """Weights whose displacement D[j] is a polynomial of the given degree in j, float64 [length + 1, size]."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(degree + 1, size, generator=generator, dtype=torch.float64)
    moves = [sum(factors[q] * (j / 4) ** q for q in range(degree + 1)) for j in range(1, length + 1)]
    return torch.cat([torch.zeros(1, size, dtype=torch.float64), torch.stack(moves).cumsum(0)])


def momentum_path(length, *, size=9, seed=0, beta=0.8):
    """Weights that move with momentum and noise, as under Adam."""
    generator = torch.Generator().manual_seed(seed)
    velocity, weights = torch.zeros(size), [torch.zeros(size)]
    for _ in range(length):
        velocity = beta * velocity + torch.randn(size, generator=generator)
        weights.append(weights[-1] + 0.1 * velocity)
    return torch.stack(weights)


def follow(path, config: ForecastConfig, *, ship_horizon=None):
    """Observes a whole path; returns the state and the scores of everything shipped on the way."""
    state = init(leaves_of(path[0].float()), config)
    scored = []
    for point in path[1:]:
        if ship_horizon is not None:
            state = record(state, plan(state, ship_horizon))
        state, seen = observe(state, leaves_of(point.float()))
        scored += seen.scored
    return state, scored


def dense(state, forecast, leaves=()):
    return torch.cat([leaf for _, leaf in stream(state, forecast, leaves)])


def view_of(state, horizon=1, group=ALL):
    """What a rule sees of a state."""
    return View(
        gram=state.unit_gram(group), version=state.version, aim=aim_of(horizon), config=state.config,
        momentum=state.momentum, num_steps=state.num_steps,
    )  # fmt: skip


def slow_least_squares(path, *, horizon, lags, order, forgetting, window, ridge, consistency):
    """The fit of the method, section 2, written with whole vectors and a null-space solve; float64, whole horizons."""
    weights = path.double().numpy()
    moves = {j: weights[j] - weights[j - 1] for j in range(1, len(weights))}
    now = len(weights) - 1
    rows, targets = [], []
    for j in range(now, max(now - window, 0), -1):
        if j - horizon + 1 - lags < 1:
            break
        scale = forgetting ** ((now - j) / 2)
        rows.append(scale * np.stack([moves[j - horizon + 1 - k] for k in range(1, lags + 1)], axis=1))
        targets.append(scale * (weights[j] - weights[j - horizon]))
    nodes = 1.0 - np.arange(1, lags + 1)
    constraints = np.stack([nodes**q for q in range(order)])
    sums = np.array([sum(i**q for i in range(1, horizon + 1)) for q in range(order)], dtype=float)
    pull = np.linalg.lstsq(constraints, sums, rcond=None)[0] if consistency != "off" else np.zeros(lags)
    if not rows:
        return pull
    design, target = np.concatenate(rows), np.concatenate(targets)
    rho = ridge * np.trace(design.T @ design) / lags
    design = np.concatenate([design, np.sqrt(rho) * np.eye(lags)])
    target = np.concatenate([target, np.sqrt(rho) * pull])
    if consistency != "hard":
        return np.linalg.lstsq(design, target, rcond=None)[0]
    particular = np.linalg.lstsq(constraints, sums, rcond=None)[0]
    free = np.linalg.svd(constraints)[2][order:].T
    if free.shape[1] == 0:
        return particular
    return particular + free @ np.linalg.lstsq(design @ free, target - design @ particular, rcond=None)[0]


def make_learner(optimizer_of, *, seed=0, **changes):
    """A small regression network, its optimizer and a forecaster."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = optimizer_of(model.parameters())
    return model, optimizer, Forecaster(model.named_parameters(), optimizer, **changes)


def train(model, optimizer, forecaster, steps, *, first=0, horizon=1, ship=True):
    """Trains on a stream of batches that depends on the step alone; returns the error ratios."""
    ratios = []
    for step in range(first, first + steps):
        if ship:
            list(forecaster.weights(horizon=horizon))
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x[:, :3].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ratios += [s.error_ratio for s in forecaster.observe().scored]
    return ratios
