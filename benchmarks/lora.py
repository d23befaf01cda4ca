"""LoRA: forecasting the factors A and B against forecasting their product, side by side on one run's updates.

    python benchmarks/lora.py tiny-addition --seeds 5
    python benchmarks/lora.py smollm2-arithmetic --seeds 2 --updates 25

A peft learner (rank 8 on every linear layer) is trained on fresh rollouts of its own, with two forecasters looking on.
After each update the KL of the learner to each forecast made before it, and to stale weights, is taken over the whole
vocabulary on the sampled positions. Ratios are of sums over the updates after the first five.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys

import torch
from common import RESULTS, log_probs, spread
from peft import LoraConfig, get_peft_model

import farl
from farl.build import build_tools, load
from farl.config import apply_overrides, load_recipe
from farl.core.types import PolicyStamp
from farl.engines.transformers_engine import CausalPolicy
from farl.forecast.lora import find_adapters, merge, plain_name
from farl.runtime.advantage import group_advantages
from farl.runtime.batch import make_batch
from farl.runtime.rollout import generate
from farl.runtime.schedule import split_batch

SKIPPED = 5
LEARNING_RATE = {"tiny-addition": 1e-3, "smollm2-arithmetic": 1e-4}


@torch.no_grad()
def sampled_log_probs(module, batch):
    """Log-probs of the whole vocabulary at every sampled token, [tokens, V]."""
    return log_probs(module, batch)[batch.mask_BT]


def kl(learner, other) -> float:
    return float((learner.exp() * (learner - other)).sum(-1).mean())


def show(module, leaves):
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, leaf in leaves:
            if name in own:  # tied weights come once
                own[name].copy_(leaf)


def run(recipe: str, updates: int, seed: int) -> dict:
    config = apply_overrides(load_recipe(recipe), ["--seed", str(seed), "--pipeline.launch", "inline"])
    torch.manual_seed(seed)
    tools = build_tools(config)
    sampled = tools.sampler._module
    shown = copy.deepcopy(sampled)
    learner = get_peft_model(
        load(config).module, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0)
    )
    policy = CausalPolicy(learner)
    trained = [p for p in learner.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE[recipe], betas=(0.9, 0.95), weight_decay=0.0)
    forecasters = {
        "factors": farl.Forecaster(learner.named_parameters(), optimizer),
        "product": farl.Forecaster(learner.named_parameters(), optimizer, lora_products=learner),
    }
    adapters = find_adapters(learner)
    sums = dict.fromkeys(("stale", *forecasters), 0.0)
    for n in range(updates):
        exact = dict(merge(adapters, ((name, p.detach()) for name, p in learner.named_parameters())))
        stamp = PolicyStamp(base_version=n, target_version=n)
        tools.sampler.load(((name, exact[name]) for name, _ in sampled.named_parameters()), stamp)
        work = split_batch(
            batch=n, first_dispatch_id=n, rollout=config.rollout, num_workers=1, seed=seed, publication=n, stamp=stamp
        )
        groups = generate(work[0], tools).groups
        batch = make_batch(
            groups, group_advantages(groups, divide_by_std=True)[0], version=n, pad_id=tools.tokenizer.pad_id
        )
        told = {"stale": sampled_log_probs(sampled, batch)}
        for name, forecaster in forecasters.items():
            leaves = forecaster.weights()
            merged = merge(adapters, leaves) if name == "factors" else ((plain_name(k), w) for k, w in leaves)
            show(shown, merged)
            told[name] = sampled_log_probs(shown, batch)
        logp = policy.logp(batch, temperature=1.0)
        weight = torch.exp(logp - batch.logp_behaviour_BT)
        loss = -(weight * batch.advantage_BT * batch.mask_BT).sum() / batch.mask_BT.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        for forecaster in forecasters.values():
            forecaster.observe()
        show(shown, merge(adapters, ((name, p.detach()) for name, p in learner.named_parameters())))
        now = sampled_log_probs(shown, batch)
        if n >= SKIPPED:
            for name, then in told.items():
                sums[name] += kl(now, then) / (updates - SKIPPED)
    history = {name: sum(r.values_CN.nbytes for r in f.state.rings.values()) for name, f in forecasters.items()}
    return {
        "seed": seed,
        "kl_stale": sums["stale"],
        **{name: sums[name] / sums["stale"] for name in forecasters},
        **{f"{name}_history_bytes": size for name, size in history.items()},
        "reward": sum(r.reward for g in groups for r in g.rollouts) / sum(len(g.rollouts) for g in groups),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=list(LEARNING_RATE))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=100)
    arguments = parser.parse_args()
    rows = []
    for seed in range(arguments.seeds):
        rows.append(run(arguments.recipe, arguments.updates, seed))
        print(json.dumps(rows[-1]), flush=True)
    record = RESULTS / f"lora-{arguments.recipe}.json"
    record.write_text(json.dumps({"command": "python " + " ".join(sys.argv), "runs": rows}, indent=1) + "\n")
    print("| forecast | KL / stale | history, bytes |\n|---|---|---|")
    for name in ("factors", "product"):
        values = [row[name] for row in rows]
        size = rows[0][f"{name}_history_bytes"]
        print(f"| {name} | {spread(values)} | {size:.1e} |")


if __name__ == "__main__":
    main()
