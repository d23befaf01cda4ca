"""Time and peak memory of one loss with its gradient at 64 x 2048 tokens: ours beside verl's, in one run.

    make bench-correctors        # in the venv of `make parity`; about two minutes

A call is forward and backward to the learner's log-probs, float32, ragged mask. verl's functions also compute the clip
fraction and a KL estimate for their logs; `ours + diagnose` adds all of our metrics. Both sides alternate, so that what
else the machine does falls on both; times are medians.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from parity import libraries as lib
from parity.libraries import Batch

from farl.correct import LossInputs, diagnose
from farl.correct.catalogue import create

ROUNDS = 30
PG = {"base": "policy_gradient"}
ROWS = [
    ("gpg", lambda: lib.verl("gpg"), "none", {"form": "score"}),
    ("vanilla, c off", lambda: lib.verl("vanilla", anchor="behaviour", clip_ratio_c=1e9), "ppo", {}),
    ("vanilla", lambda: lib.verl("vanilla", anchor="behaviour"), "dual_clip_ppo", {}),
    ("vanilla x TIS", lambda: lib.verl("vanilla", correction={"rollout_is": "token"}), "tis", {}),
    ("vanilla x TIS sequence", lambda: lib.verl("vanilla", correction={"rollout_is": "sequence"}), "tis", {"level": "sequence"}),
    ("reinforce x TIS", lambda: lib.verl_reinforce(rollout_is="token"), "tis", PG),
    ("vanilla x IcePop", lambda: lib.verl("vanilla", correction={"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}), "icepop", {}),
    ("vanilla x token_k1", lambda: lib.verl("vanilla", correction={"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_5.0"}), "mis", {"level": "token", "floor": 0.5, "cap": 5.0, "survivor": "one", "inverse": True, "denominator": "kept"}),
    ("dppo_tv", lambda: lib.verl("dppo_tv", anchor="behaviour"), "dppo", {"form": "score"}),
    ("dppo_kl", lambda: lib.verl("dppo_kl", anchor="behaviour", clip_ratio=0.05, clip_ratio_low=0.05, clip_ratio_high=0.05), "dppo", {"form": "score", "divergence": "kl"}),
    ("gspo", lambda: lib.verl("gspo", anchor="behaviour", aggregation="seq-mean-token-mean", clip_ratio_low=0.1, clip_ratio_high=0.1), "gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("sapo", lambda: lib.verl("sapo", anchor="behaviour"), "sapo", {}),
    ("geo_mean", lambda: lib.verl("geo_mean", anchor="behaviour", clip_ratio=0.4, clip_ratio_low=0.4, clip_ratio_high=0.4), "gmpo", {}),
    ("dro", lambda: lib.verl("dro", anchor="behaviour", dro_beta=0.05), "dro", {}),
    ("cispo", lambda: lib.verl("cispo", anchor="behaviour", clip_ratio_low=1.0, clip_ratio_high=4.0), "cispo", {}),
]  # fmt: skip


def make_batch(sequences=64, width=2048):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    learner = -draw(sequences, width).abs() - 0.05
    length = torch.randint(width // 4, width + 1, (sequences,), generator=generator)
    return Batch(
        learner=learner.requires_grad_(),
        behaviour=(learner.detach() + 0.1 * draw(sequences, width)).clamp(max=-0.01),
        proximal=(learner.detach() + 0.05 * draw(sequences, width)).clamp(max=-0.01),
        mask=torch.arange(width) < length[:, None],
        advantage=draw(sequences),
        lag=torch.ones(sequences, width, dtype=torch.int64),
    )


def inputs_of(batch):
    return LossInputs(
        logp_learner_BT=batch.learner,
        logp_behaviour_BT=batch.behaviour,
        logp_proximal_BT=batch.proximal,
        mask_BT=batch.mask,
        advantage_BT=batch.advantages,
    )


def ours(corrector, batch, *, metrics=False):
    inputs = inputs_of(batch)
    context = corrector.prepare(inputs)
    output = corrector(inputs, context)
    loss = corrector.aggregate(output, batch.mask, corrector.denominator(batch.mask, context))
    if metrics:
        diagnose(inputs, output)
    return loss


def call(loss, batch):
    batch.learner.grad = None
    loss(batch).backward()


def seconds(loss, batch):
    start = time.perf_counter()
    call(loss, batch)
    return time.perf_counter() - start


def peak_bytes(loss, batch):
    """Largest sum of live allocations during a call, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call(loss, batch)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def main():
    torch.set_num_threads(1)
    batch = make_batch()
    token_bytes = batch.learner.numel() * 4
    rows = []
    for name, build, corrector_name, options in ROWS:
        corrector, theirs = create(corrector_name, **options), build()

        def mine(b, corrector=corrector):
            return ours(corrector, b)

        def with_metrics(b, corrector=corrector):
            return ours(corrector, b, metrics=True)

        torch._dynamo.reset()
        compiled_corrector = torch.compile(corrector, fullgraph=True, dynamic=False)

        def compiled(b, compiled_corrector=compiled_corrector, corrector=corrector):
            inputs = inputs_of(b)
            context = corrector.prepare(inputs)
            output = compiled_corrector(inputs, context)
            return corrector.aggregate(output, b.mask, corrector.denominator(b.mask, context))

        sides = {"verl": theirs, "ours": mine, "diagnose": with_metrics, "compiled": compiled}
        for loss in sides.values():
            for _ in range(3):
                call(loss, batch)
        times = {side: [] for side in sides}
        for _ in range(ROUNDS):
            for side, loss in sides.items():
                times[side].append(seconds(loss, batch))
        median = {side: statistics.median(values) for side, values in times.items()}
        memory = {side: peak_bytes(sides[side], batch) for side in ("verl", "ours", "compiled")}
        rows.append(
            {
                "verl": name,
                "ours": corrector_name,
                "options": options,
                "verl_ms": 1e3 * median["verl"],
                "time_ratio": median["ours"] / median["verl"],
                "time_ratio_with_diagnose": median["diagnose"] / median["verl"],
                "time_ratio_compiled": median["compiled"] / median["verl"],
                "memory_ratio": memory["ours"] / memory["verl"],
                "memory_ratio_compiled": memory["compiled"] / memory["verl"],
                "peak_in_token_tensors": memory["ours"] / token_bytes,
            }
        )
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    summary = {
        key: statistics.median(row[key] for row in rows)
        for key in rows[0]
        if isinstance(rows[0][key], float) and "ratio" in key
    }
    print("median", {k: round(v, 3) for k, v in summary.items()})
    print("worst", {k: round(max(row[k] for row in rows), 3) for k in summary})
    record = {
        "tokens": "64 x 2048",
        "threads": 1,
        "rounds": ROUNDS,
        "torch": torch.__version__,
        "verl": lib.version("verl"),
        "rows": rows,
        "median": summary,
    }
    (Path(__file__).parent / "results" / "correctors.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
