"""Our correctors against other libraries' own functions: value and gradient on the shared and on 200 random batches."""

import pytest
import torch

import farl.correct

from . import libraries as lib
from .libraries import Batch

TOLERANCE = 1e-6
BATCHES = 200
SMM, SMS, SMSN = "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
PG = {"base": "policy_gradient"}

# (library, function, arguments of `libraries`, our corrector, our options)
ROWS = [
    ("verl", "vanilla", lambda: lib.verl("vanilla"), "dual_clip_ppo", {"anchor": "proximal"}),
    ("verl", "vanilla, old = behaviour", lambda: lib.verl("vanilla", anchor="behaviour"), "dual_clip_ppo", {}),
    ("verl", "vanilla, c off", lambda: lib.verl("vanilla", anchor="behaviour", clip_ratio_c=1e9), "ppo", {}),
    ("verl", "vanilla 0.2/0.28, c off", lambda: lib.verl("vanilla", anchor="behaviour", clip_ratio_high=0.28, clip_ratio_c=1e9), "dapo", {}),
    *[
        ("verl", f"vanilla, {mode}", lambda mode=mode: lib.verl("vanilla", aggregation=mode), "dual_clip_ppo", {"anchor": "proximal", "reduction": ours})
        for mode, ours in (("seq-mean-token-mean", SMM), ("seq-mean-token-sum", SMS), ("seq-mean-token-sum-norm", SMSN))
    ],
    ("verl", "gpg", lambda: lib.verl("gpg"), "none", {"form": "score"}),
    ("verl", "vanilla x rollout_is=token", lambda: lib.verl("vanilla", clip_ratio_c=1e9, correction={"rollout_is": "token"}), "tis", {}),
    ("verl", "vanilla x rollout_is=sequence", lambda: lib.verl("vanilla", clip_ratio_c=1e9, correction={"rollout_is": "sequence"}), "tis", {"level": "sequence"}),
    ("verl", "vanilla x token, batch_normalize", lambda: lib.verl("vanilla", clip_ratio_c=1e9, correction={"rollout_is": "token", "rollout_is_batch_normalize": True}), "tis", {"normalise": True}),
    ("verl", "vanilla x sequence, batch_normalize", lambda: lib.verl("vanilla", clip_ratio_c=1e9, correction={"rollout_is": "sequence", "rollout_is_batch_normalize": True}), "tis", {"normalise": True, "level": "sequence"}),
    ("verl", "reinforce x rollout_is=token", lambda: lib.verl_reinforce(rollout_is="token"), "tis", PG),
    ("verl", "reinforce x rollout_is=sequence", lambda: lib.verl_reinforce(rollout_is="sequence"), "tis", {**PG, "level": "sequence"}),
    ("verl", "vanilla x IcePop 0.5_5.0", lambda: lib.verl("vanilla", clip_ratio_c=1e9, correction={"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}), "icepop", {}),
    ("verl", "reinforce x IcePop 0.5_5.0", lambda: lib.verl_reinforce(rollout_is="token", rollout_is_threshold="0.5_5.0"), "icepop", PG),
    *[
        ("verl", f"vanilla x rollout_rs={mode} {low}_{high}", lambda mode=mode, low=low, high=high: lib.verl("vanilla", clip_ratio_c=1e9, correction={"rollout_rs": mode, "rollout_rs_threshold": f"{low}_{high}"}), "mis", {"level": level, "floor": low, "cap": high, "survivor": "one", "inverse": True, "denominator": "kept"})
        for mode, level, low, high in (("token_k1", "token", 0.5, 5.0), ("seq_sum_k1", "sequence", 0.4, 3.0), ("seq_mean_k1", "geometric", 0.9, 1.3))
    ],
    ("verl", "dppo_tv", lambda: lib.verl("dppo_tv", anchor="behaviour"), "dppo", {"form": "score"}),
    ("verl", "dppo_kl 0.05", lambda: lib.verl("dppo_kl", anchor="behaviour", clip_ratio=0.05, clip_ratio_low=0.05, clip_ratio_high=0.05), "dppo", {"form": "score", "divergence": "kl"}),
    ("verl", "gspo 0.1/0.1", lambda: lib.verl("gspo", anchor="behaviour", aggregation="seq-mean-token-mean", clip_ratio_low=0.1, clip_ratio_high=0.1), "gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("verl", "gspo 3e-4/4e-4", lambda: lib.verl("gspo", aggregation="seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4), "gspo", {"anchor": "proximal"}),
    ("verl", "sapo", lambda: lib.verl("sapo", anchor="behaviour"), "sapo", {}),
    ("verl", "geo_mean 0.4", lambda: lib.verl("geo_mean", anchor="behaviour", clip_ratio=0.4, clip_ratio_low=0.4, clip_ratio_high=0.4), "gmpo", {}),
    ("verl", "dro 0.05", lambda: lib.verl("dro", anchor="behaviour", dro_beta=0.05), "dro", {}),
    ("verl", "dro 0.1", lambda: lib.verl("dro", anchor="behaviour", dro_beta=0.1), "opmd", {"form": "token"}),
    ("verl", "cispo 1.0/4.0", lambda: lib.verl("cispo", anchor="behaviour", clip_ratio_low=1.0, clip_ratio_high=4.0), "cispo", {}),
    ("verl", "cispo 0.2/0.2", lambda: lib.verl("cispo", anchor="behaviour"), "cispo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("areal", "ppo, decoupled off", lambda: lib.areal(anchor="behaviour"), "ppo", {}),
    ("areal", "ppo, c_clip 3", lambda: lib.areal(anchor="behaviour", c_clip=3.0), "dual_clip_ppo", {}),
    ("areal", "ppo 0.2/0.28", lambda: lib.areal(anchor="behaviour", eps_clip_higher=0.28), "dapo", {}),
    ("areal", "decoupled, no rejection: no weight", lambda: lib.areal(), "ppo", {"anchor": "proximal"}),
    ("areal", "decoupled, token mask 5", lambda: lib.areal(rejection={"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0}), "decoupled_ppo", {}),
    ("areal", "decoupled, token mask 1.2", lambda: lib.areal(rejection={"level": "token", "action": "mask", "metric": "ratio", "upper": 1.2}), "decoupled_ppo", {"cap": 1.2}),
    ("areal", "decoupled, token clamp 1.2", lambda: lib.areal(rejection={"level": "token", "action": "clamp", "metric": "ratio", "upper": 1.2}), "decoupled_ppo", {"cap": 1.2, "cap_action": "clamp"}),
    ("areal", "decoupled, sequence mask 1.1", lambda: lib.areal(rejection={"level": "sequence", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 1.1}), "decoupled_ppo", {"cap": 1.1, "level": "geometric"}),
    ("areal", "decoupled, sequence clamp 1.1", lambda: lib.areal(rejection={"level": "sequence", "action": "clamp", "metric": "ratio", "agg": "mean", "upper": 1.1}), "decoupled_ppo", {"cap": 1.1, "level": "geometric", "cap_action": "clamp"}),
    ("areal", "loglinear proximal, mask 5", lambda: lib.areal_a3po(rejection={"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0}), "a3po", {}),
    ("areal", "loglinear proximal, clamp 1.1", lambda: lib.areal_a3po(rejection={"level": "token", "action": "clamp", "metric": "ratio", "upper": 1.1}), "a3po", {"cap": 1.1, "cap_action": "clamp"}),
    ("areal", "ppo, sequence ratio, kept tokens", lambda: lib.areal(anchor="behaviour", level="sequence", eps_clip=0.1), "gspo", {"clip_low": 0.1, "clip_high": 0.1, "form": "direct", "reduction": "token_mean"}),
    ("areal", "m2po mask 0.1, no clip", lambda: lib.areal_m2po(0.1), "m2po", {"threshold": 0.1, "statistic": "proximal", "denominator": "kept"}),
    ("areal", "sapo", lambda: lib.areal_sapo(), "sapo", {"reduction": "token_mean"}),
    ("openrlhf", "ppo", lambda: lib.openrlhf(), "ppo", {"anchor": "proximal"}),
    ("openrlhf", "ppo, sample mean", lambda: lib.openrlhf(token_level_loss=False), "ppo", {"anchor": "proximal", "reduction": SMM}),
    ("openrlhf", "ppo, dual_clip 3", lambda: lib.openrlhf(dual_clip=3.0), "dual_clip_ppo", {"anchor": "proximal"}),
    ("openrlhf", "token mask [0.5, 5]", lambda: lib.openrlhf(is_correction_level="token"), "icepop", {}),
    ("openrlhf", "token clip [0.5, 5]", lambda: lib.openrlhf(is_correction_level="token", is_correction_mode="clip"), "tis", {"floor": 0.5, "cap": 5.0}),
    ("openrlhf", "seq mask [0.9, 1.2]", lambda: lib.openrlhf(is_correction_level="seq", is_correction_threshold=[0.9, 1.2]), "mis", {"level": "geometric", "floor": 0.9, "cap": 1.2, "survivor": "token"}),
    ("openrlhf", "gspo 0.1", lambda: lib.openrlhf(policy_loss_type="gspo", clip_eps_low=0.1, clip_eps_high=0.1), "gspo", {"anchor": "proximal", "form": "direct", "clip_low": 0.1, "clip_high": 0.1}),
    ("openrlhf", "gspo 0.1, correction on", lambda: lib.openrlhf(policy_loss_type="gspo", clip_eps_low=0.1, clip_eps_high=0.1, is_correction_level="token"), "gspo", {"form": "direct", "clip_low": 0.1, "clip_high": 0.1}),
    ("trl", "dapo", lambda: lib.trl("dapo", anchor="behaviour"), "ppo", {}),
    ("trl", "dapo 0.2/0.28", lambda: lib.trl("dapo", anchor="behaviour", epsilon_high=0.28), "dapo", {}),
    ("trl", "bnpo", lambda: lib.trl("bnpo"), "ppo", {"anchor": "proximal"}),
    ("trl", "grpo", lambda: lib.trl("grpo"), "ppo", {"anchor": "proximal", "reduction": SMM}),
    ("trl", "dr_grpo, length 9", lambda: lib.trl("dr_grpo"), "ppo", {"anchor": "proximal", "reduction": SMSN, "horizon": 9}),
    ("trl", "dapo, delta 1.5", lambda: lib.trl("dapo", delta=1.5), "ppo", {"anchor": "proximal", "ratio_cap": 1.5}),
    ("trl", "grpo, sequence ratio", lambda: lib.trl("grpo", level="sequence", epsilon=0.1, epsilon_high=0.1), "gspo", {"anchor": "proximal", "form": "direct", "clip_low": 0.1, "clip_high": 0.1}),
    ("trl", "luspo", lambda: lib.trl("luspo", level="token", epsilon=0.2), "ppo", {"anchor": "proximal", "reduction": SMS}),
    ("trl", "cispo, epsilon_high 5", lambda: lib.trl("cispo", anchor="behaviour", epsilon_high=5.0), "cispo", {"bounds": "absolute", "clip_low": 0.0, "clip_high": 5.0}),
    ("trl", "sapo", lambda: lib.trl("sapo", anchor="behaviour"), "sapo", {}),
    ("trl", "vespo", lambda: lib.trl("vespo", anchor="behaviour"), "vespo", {}),
    ("trl", "dapo, off_policy_mask 0.05", lambda: lib.trl("dapo", opsm=0.05), "opsm", {"anchor": "proximal", "delta": 0.05}),
    ("skyrl", "regular", lambda: lib.skyrl("ppo_policy_loss"), "ppo", {"anchor": "proximal"}),
    ("skyrl", "dual_clip", lambda: lib.skyrl("ppo_policy_loss", policy_loss_type="dual_clip"), "dual_clip_ppo", {"anchor": "proximal"}),
    ("skyrl", "regular x tis token", lambda: lib.skyrl("ppo_policy_loss", correction={"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}), "tis", {}),
    ("skyrl", "regular x tis sequence", lambda: lib.skyrl("ppo_policy_loss", correction={"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 5.0}), "tis", {"level": "sequence", "cap": 5.0}),
    ("skyrl", "regular, product mask", lambda: lib.skyrl("ppo_policy_loss", correction={"sequence_mask_metric": "product", "product_mask_low": 0.5, "product_mask_high": 2.0}), "mis", {"level": "sequence", "floor": 0.5, "cap": 2.0, "survivor": "one"}),
    ("skyrl", "regular, geometric mask", lambda: lib.skyrl("ppo_policy_loss", correction={"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1}), "mis", {"level": "geometric", "floor": 0.9, "cap": 1.1, "survivor": "one"}),
    ("skyrl", "cispo, rollout", lambda: lib.skyrl("compute_policy_loss_cispo", cispo={"cispo_anchor": "rollout", "cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0}), "cispo", {}),
    ("skyrl", "rollout_is", lambda: lib.skyrl("rollout_is_policy_loss"), "glm5", {}),
    ("skyrl", "sapo", lambda: lib.skyrl("sapo_policy_loss", sapo={"tau_pos": 1.0, "tau_neg": 1.05}), "sapo", {"anchor": "proximal", "reduction": "token_mean"}),
    ("skyrl", "gspo 0.1", lambda: lib.skyrl("gspo_policy_loss", eps=0.1, eps_high=0.1), "gspo", {"anchor": "proximal", "clip_low": 0.1, "clip_high": 0.1, "reduction": "token_mean"}),
    ("skyrl", "dppo binary_tv", lambda: lib.skyrl("dppo_policy_loss", dppo={"dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2}), "dppo", {"kl_penalty": 0.0}),
    ("skyrl", "dppo binary_kl", lambda: lib.skyrl("dppo_policy_loss", dppo={"dppo_type": "binary_kl", "delta_low": 0.05, "delta_high": 0.05}), "dppo", {"kl_penalty": 0.0, "divergence": "kl"}),
]  # fmt: skip


def random_batch(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sequences, width = 6, 8
    spread = 0.05 + 0.6 * float(torch.rand((), generator=generator))
    learner = -draw(sequences, width).abs() - 0.05
    behaviour = (learner + spread * draw(sequences, width)).clamp(max=-0.01)
    proximal = (learner + 0.5 * spread * draw(sequences, width)).clamp(max=-0.01)
    length = torch.randint(1, width + 1, (sequences,), generator=generator)
    mask = torch.arange(width) < length[:, None]
    learner = torch.where(mask, learner, -0.7)
    behaviour, proximal = torch.where(mask, behaviour, -9.0), torch.where(mask, proximal, -3.0)
    lag = torch.randint(0, 5, (sequences, width), generator=generator)
    return Batch(learner.requires_grad_(), behaviour, proximal, mask, draw(sequences), lag)


def shared_batch():
    """The worked inputs of the golden file."""
    rows = {
        "learner": [[0.57, 0.31, 0.90], [0.19, 0.50, 0.05]],
        "behaviour": [[0.50, 0.10, 0.85], [0.40, 0.45, 0.90]],
        "proximal": [[0.55, 0.21, 0.88], [0.30, 0.48, 0.40]],
    }
    logs = {name: torch.tensor(value, dtype=torch.float64).log() for name, value in rows.items()}
    logs["learner"].requires_grad_()
    mask = torch.tensor([[True, True, True], [True, True, False]])
    return Batch(
        **logs, mask=mask, advantage=torch.tensor([1.0, -1.0]).double(), lag=torch.tensor([[0, 2, 2], [1, 3, 1]])
    )


def ours(name, options):
    def loss(batch):
        return getattr(farl.correct, name)(
            batch.learner,
            batch.behaviour,
            batch.advantage,
            batch.mask,
            logp_proximal=batch.proximal,
            lag=batch.lag,
            **options,
        )

    return loss


def value_and_gradient(loss, batch):
    value = loss(batch)
    gradient = torch.autograd.grad(value, batch.learner, allow_unused=True, materialize_grads=True)[0]
    return value.detach().double(), torch.where(batch.mask, gradient, 0.0)


def relative(got, expected, floor):
    """Largest difference over the largest expected number, or over `floor` where sums cancel to less."""
    return float((got - expected).abs().max() / max(float(expected.abs().max()), floor))


@pytest.mark.parametrize("row", ROWS, ids=[f"{r[0]}-{r[1]}".replace(" ", "_") for r in ROWS])
def test_value_and_gradient(row, record_parity):
    library, function, build, name, options = row
    theirs, mine = build(), ours(name, options)
    worst_value = worst_gradient = 0.0
    moved = 0
    for batch in (shared_batch(), *(random_batch(seed) for seed in range(BATCHES))):
        (their_value, their_gradient), (value, gradient) = (value_and_gradient(f, batch) for f in (theirs, mine))
        floor = float(batch.advantage.abs().mean())
        worst_value = max(worst_value, relative(value, their_value, floor))
        worst_gradient = max(worst_gradient, relative(gradient, their_gradient, 1e-3 * floor))
        moved += bool(their_gradient.any())
    record_parity(library, function, name, options, 1 + BATCHES, worst_value, worst_gradient)
    assert moved > BATCHES / 10 or "3e-4" in function, "a comparison of zeros says nothing"
    assert worst_value <= TOLERANCE
    assert worst_gradient <= TOLERANCE
