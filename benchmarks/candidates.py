"""Searches for a better forecast: what each candidate would have left of stale's KL, side by side on the same batches.

    python benchmarks/candidates.py --seeds 5

Trains tiny-addition with the product's own loop at lag 1 and, at each update, makes one forward pass for every basis
element (displacements of past and coming updates, parts of them, running means, the first micro-batches' gradient): how
it moves the logits of the batch about to be consumed. To first order a forecast is a combination of elements, so its KL
to the learner is a quadratic form in the Fisher matrix of these responses, and every candidate costs one matrix.

Coefficients are fitted online: at version t from targets known at t, with forgetting .97 and ridge .005, in the inner
product the candidate names. In brackets: the best constant vector in hindsight, a bound for a family and no forecast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import deque
from pathlib import Path

import torch
from common import QUIET, RESULTS, log_probs, spread

import farl.runtime.consume as consume
from farl.config import apply_overrides, load_recipe
from farl.forecast.groups import group_of
from farl.train import start

LAGS, AHEAD = 8, 4
FORGETTING, RIDGE = 0.97, 0.005
KINDS = ("embedding", "attention", "mlp", "norm")
SETTINGS = {
    "small steps": ["--optimizer.lr", "3e-5"],
    "large steps": ["--optimizer.lr", "2e-4"],
    "beta1 = 0": ["--optimizer.lr", "3e-5", "--optimizer.beta1", "0"],
}
CASES = (("small steps", 1), ("small steps", 4), ("large steps", 1), ("large steps", 4), ("beta1 = 0", 1))

D = [f"D{k}" for k in range(1, LAGS + 1)]
CANDIDATES = {  # name: (elements, inner product)
    "copy, fitted length": (D[:1], "euclidean"),
    "4 lags, euclidean": (D[:4], "euclidean"),
    "4 lags, adam (v)": (D[:4], "adam"),
    "4 lags, sharp 1 %": (D[:4], "sharp 0.01"),
    "4 lags, sharp 3 %": (D[:4], "sharp 0.03"),
    "4 lags, sharp 10 %": (D[:4], "sharp 0.1"),
    "4 lags, Fisher of 128 probe tokens": (D[:4], "probe"),
    "4 lags, Fisher of the batch": (D[:4], "fisher"),
    "2 lags, sharp 3 %": (D[:2], "sharp 0.03"),
    "8 lags, sharp 3 %": (D, "sharp 0.03"),
    "2 lags by kind of weight, sharp 3 %": ([f"{d}/{kind}" for d in D[:2] for kind in KINDS], "sharp 0.03"),
    "2 lags by curvature band, adam": ([f"{d}/band{b}" for d in D[:2] for b in range(3)], "adam"),
    "2 lags by curvature band, Fisher of the probe": ([f"{d}/band{b}" for d in D[:2] for b in range(3)], "probe"),
    "oscillating subspace: D1 inside and outside the span of D2..D8": (["inside", "outside"], "sharp 0.03"),
    "4 lags and running means, sharp 3 %": ([*D[:4], "mean 0.7", "mean 0.9", "mean 0.97"], "sharp 0.03"),
    "4 lags and moments, sharp 3 %": ([*D[:4], "moments"], "sharp 0.03"),
    "4 lags and the gradient of 1/4 of the batch": ([*D[:4], "gradient 1/4"], "sharp 0.03"),
    "4 lags and the gradient of 1/2 of the batch": ([*D[:4], "gradient 1/2"], "sharp 0.03"),
}


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def put(parameters, vector):
    start_at = 0
    for p in parameters:
        p.data = vector[start_at : start_at + p.numel()].view(p.shape)
        start_at += p.numel()


class Recorder:
    """Wraps the product's `update`: keeps recent states, and measures those whose future has become known."""

    def __init__(self) -> None:
        self.inner = consume.update
        self.recent: deque[dict] = deque(maxlen=LAGS + AHEAD + 3)
        self.measured: list[dict] = []
        self.version = 0
        self.means: dict[float, torch.Tensor] = {}

    def __call__(self, policy, optimizer, corrector, mini, *, config, lr, before_step=None):
        """Makes the update, and measures the version whose future it completes."""
        parameters = list(policy.module.parameters())
        theta = flat(parameters)
        if not self.version:
            names = [n for n, _ in policy.module.named_parameters()]
            kinds = [KINDS.index(group_of(n, "kind")) for n in names]
            self.kind = torch.cat([torch.full((p.numel(),), k) for p, k in zip(parameters, kinds, strict=True)])
            self.means = {decay: torch.zeros_like(theta) for decay in (0.7, 0.9, 0.97)}
        else:
            for decay, mean in self.means.items():
                mean.lerp_(theta - self.recent[-1]["theta"], 1 - decay)
        state = optimizer.state
        first = flat(state[p]["exp_avg"] for p in parameters) if state else torch.zeros_like(theta)
        second = flat(state[p]["exp_avg_sq"] for p in parameters) if state else torch.zeros_like(theta)
        kept = {
            "version": self.version,
            "theta": theta,
            "first": first,
            "second": second,
            "means": {decay: mean.clone() for decay, mean in self.means.items()},
            "batch": mini.batch,
            "lr": lr,
            "optimizer": config.optimizer,
        }
        result = self.inner(policy, optimizer, corrector, mini, config=config, lr=lr, before_step=before_step)
        norm = result.metrics["optim/grad_norm"]
        kept["clip"] = min(1.0, config.optimizer.max_grad_norm / norm) if norm else 1.0
        self.recent.append(kept)
        self.version += 1
        if self.version - AHEAD > LAGS + 1:
            with torch.no_grad():
                self.measure(policy, self.version - 1 - AHEAD)
            for p in parameters:
                p.grad = None
        return result

    def elements(self, policy, t):
        """Names and vectors of every basis element at version t."""
        by = {r["version"]: r for r in self.recent}
        now, adam = by[t], by[t]["optimizer"]
        move = {j: by[j]["theta"] - by[j - 1]["theta"] for j in range(t - LAGS + 1, t + AHEAD + 1)}
        yield from ((f"F{i}", move[t + i]) for i in range(1, AHEAD + 1))
        yield from ((f"D{k}", move[t + 1 - k]) for k in range(1, LAGS + 1))
        curvature = now["second"] / (1 - adam.beta2**t)
        cuts = torch.quantile(curvature[:: max(1, len(curvature) // 20000)], torch.tensor([0.5, 0.9]))
        band = (curvature > cuts[0]).int() + (curvature > cuts[1]).int()
        for k in (1, 2):
            yield from ((f"D{k}/{kind}", move[t + 1 - k] * (self.kind == i)) for i, kind in enumerate(KINDS))
            yield from ((f"D{k}/band{b}", move[t + 1 - k] * (band == b)) for b in range(3))
        yield from ((f"mean {decay}", mean) for decay, mean in now["means"].items())
        ahead = (adam.beta2 * now["second"] / (1 - adam.beta2 ** (t + 1))).sqrt() + adam.eps
        yield "moments", -now["lr"] * adam.beta1 * now["first"] / (1 - adam.beta1 ** (t + 1)) / ahead
        parameters = list(policy.module.parameters())
        scale = -now["lr"] * (1 - adam.beta1) / (1 - adam.beta1 ** (t + 1)) / (curvature.sqrt() + adam.eps)
        groups = now["batch"].num_prompts
        for name, count in (("gradient 1/4", groups // 4), ("gradient 1/2", groups // 2)):
            part = now["batch"].select_groups(0, count)
            put(parameters, now["theta"])
            with torch.enable_grad():
                logp = policy.logp(part, temperature=1.0)
                loss = -(logp * part.advantage_BT * part.mask_BT).sum() / part.mask_BT.sum()
                gradient = flat(torch.autograd.grad(loss, parameters))
            yield name, scale * now["clip"] * gradient

    def measure(self, policy, t):
        """Forms the matrices of inner products of all elements at version t, in every metric."""
        by = {r["version"]: r for r in self.recent}
        now = by[t]
        parameters = list(policy.module.parameters())
        own = [p.data for p in parameters]
        part = by[t + 1]["batch"].select_groups(0, 12)
        try:
            put(parameters, now["theta"])
            base = log_probs(policy.module, part)
            names, vectors, responses = [], [], []
            for name, vector in self.elements(policy, t):
                put(parameters, now["theta"] + vector)
                names.append(name)
                vectors.append(vector)
                responses.append(log_probs(policy.module, part) - base)
        finally:
            for p, data in zip(parameters, own, strict=True):
                p.data = data
        response = torch.stack(responses)
        probability = base.exp()
        centred = response - (response * probability).sum(-1, keepdim=True)
        wide = (centred * probability.sqrt())[:, part.mask_BT].flatten(1)
        rows = torch.stack(vectors)
        curvature = now["second"]
        grams = {"fisher": wide @ wide.T / part.mask_BT.sum(), "euclidean": rows @ rows.T}
        probed = part.mask_BT & (part.group_B < 4).unsqueeze(1)
        ids = part.completion_ids_BT[None, :, :, None].expand(len(names), -1, -1, 1)
        token = response.gather(-1, ids)[..., 0][:, probed]
        grams["probe"] = token @ token.T
        grams["adam"] = (rows * curvature) @ rows.T
        order = curvature.argsort(descending=True)
        for share in (0.01, 0.03, 0.1):
            few = rows[:, order[: int(share * len(order))]]
            grams[f"sharp {share}"] = few @ few.T
        self.measured.append({"t": t, "names": names, "grams": {k: g.double() for k, g in grams.items()}})


def with_subspace(records):
    """Adds D1 split into its part in the span of D2..D8 (in the sharp metric) and the rest."""
    for record in records:
        names, gram = record["names"], record["grams"]["sharp 0.03"]
        lags = [names.index(d) for d in D]
        span, first = lags[1:], lags[0]
        inside = torch.linalg.lstsq(gram[span][:, span], gram[span, first].unsqueeze(1), driver="gelsd").solution[:, 0]
        weights = torch.zeros(2, len(names), dtype=torch.float64)
        weights[0, span] = inside
        weights[1, span], weights[1, first] = -inside, 1.0
        full = torch.cat([torch.eye(len(names), dtype=torch.float64), weights])
        record["names"] = [*names, "inside", "outside"]
        record["grams"] = {key: full @ g @ full.T for key, g in record["grams"].items()}


def ratio(records, elements, metric, horizon, *, hindsight=False):
    """KL over stale's, summed over the run, of coefficients fitted online (or once, in hindsight)."""
    names = records[0]["names"]
    basis = [names.index(e) for e in elements]
    target = torch.zeros(len(names), dtype=torch.float64)
    for i in range(1, horizon + 1):
        target[names.index(f"F{i}")] = 1
    by = {r["t"]: r for r in records}
    left = torch.zeros(len(basis), len(basis), dtype=torch.float64)
    right = torch.zeros(len(basis), dtype=torch.float64)
    if hindsight:
        left = sum(r["grams"]["fisher"][basis][:, basis] for r in records)
        right = sum((r["grams"]["fisher"] @ target)[basis] for r in records)
    kl = stale = 0.0
    for record in records:
        past = by.get(record["t"] - horizon)
        if past is not None and not hindsight:
            gram = past["grams"][metric]
            left = FORGETTING * left + gram[basis][:, basis]
            right = FORGETTING * right + (gram @ target)[basis]
        miss = target.clone()
        if float(left.trace()) > 0:
            size = left.diagonal().clamp(min=1e-30).sqrt()
            scaled = left / size / size.unsqueeze(1)
            ridge = (1e-6 if hindsight else RIDGE) * torch.eye(len(basis))
            solution = torch.linalg.lstsq(scaled + ridge, (right / size).unsqueeze(1), driver="gelsd").solution[:, 0]
            miss[basis] -= solution / size
        kl += float(miss @ record["grams"]["fisher"] @ miss)
        stale += float(target @ record["grams"]["fisher"] @ target)
    return kl / stale, stale / 2 / len(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=110)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--name", default="candidates")
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for setting in arguments.settings:
        for seed in range(arguments.seeds):
            recorder = consume.update = Recorder()
            config = apply_overrides(
                load_recipe("tiny-addition"),
                [*QUIET, *SETTINGS[setting], "--learner.num-batches", str(arguments.updates), "--seed", str(seed)],
            )
            with tempfile.TemporaryDirectory() as folder:
                start(config, run_dir=Path(folder) / "run", show=False)
            consume.update = recorder.inner
            with_subspace(recorder.measured)
            for horizon in (h for s, h in CASES if s == setting):
                column = f"{setting}, h = {horizon}"
                for name, (elements, metric) in CANDIDATES.items():
                    value, kl = ratio(recorder.measured, elements, metric, horizon)
                    bound, _ = ratio(recorder.measured, elements, metric, horizon, hindsight=True)
                    found.setdefault(name, {}).setdefault(column, []).append(value)
                    found.setdefault(f"{name} (foreseen)", {}).setdefault(column, []).append(bound)
                found.setdefault("KL of stale, nats", {}).setdefault(column, []).append(kl)
            print(f"{setting}, seed {seed}: done", flush=True)
            record = RESULTS / f"{arguments.name}.json"
            command = f"python benchmarks/candidates.py --seeds {arguments.seeds} --updates {arguments.updates}"
            record.write_text(json.dumps({"command": command, "ratios": found}, indent=1) + "\n")
    print(table(found))


def table(found):
    """The record as Markdown: mean and spread over seeds, and the bound in brackets."""
    columns = list(dict.fromkeys(c for row in found.values() for c in row))
    lines = ["| candidate | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in found.items():
        if name.endswith("(foreseen)"):
            continue
        cells = []
        for column in columns:
            values = row[column]
            if "nats" in name:
                cells.append(f"{statistics.mean(values):.1e}")
                continue
            bound = statistics.mean(found[f"{name} (foreseen)"][column])
            cells.append(f"{spread(values)} ({bound:.3f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
