"""Other libraries' loss functions behind one call: `loss(batch) -> scalar`, nothing of ours inside.

Each function below calls the library's own code. What a library keeps in trainers and configs is given to it as the
smallest stand-in its code accepts; formulas are never repeated here.
"""

import importlib
import sys
import types
import typing
from collections import defaultdict
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import torch
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # skyrl declares Python 3.12 and needs only this of it


@dataclass(frozen=True)
class Batch:
    """float64 [B, T] log-probs, with finite garbage at padding; mask bool [B, T]; advantage [B]."""

    learner: torch.Tensor
    behaviour: torch.Tensor
    proximal: torch.Tensor
    mask: torch.Tensor
    advantage: torch.Tensor
    lag: torch.Tensor

    @property
    def advantages(self):
        return self.advantage[:, None].expand_as(self.learner)

    @property
    def float_mask(self):
        return self.mask.to(self.learner.dtype)


def version(library):
    return metadata.version(library)


def without_package_code(package, module):
    """Imports one module without running the `__init__` of the packages above it, which import GPU libraries."""
    parts = module.split(".")
    folder = Path(metadata.distribution(package).locate_file(package))
    for depth in range(len(parts)):
        name = ".".join([package, *parts[:depth]])
        if name not in sys.modules:
            stand_in = types.ModuleType(name)
            stand_in.__path__ = [str(folder.joinpath(*parts[:depth]))]
            sys.modules[name] = stand_in
    return importlib.import_module(f"{package}.{module}")


# ------------------------------------------------------------------------------------------------ verl


def verl(mode, *, anchor="proximal", aggregation="token-mean", dro_beta=None, correction=None, **actor):
    """A registered policy loss; `correction` are arguments of verl's rollout correction of proximal / behaviour."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import ActorConfig, PolicyLossConfig

    policy_loss = PolicyLossConfig(loss_mode=mode, dro_beta=dro_beta)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss, **actor)
    function = get_policy_loss_fn(mode)

    def loss(batch):
        weights, mask = None, batch.float_mask
        if correction is not None:
            proto, mask, _ = compute_rollout_correction_and_rejection_mask(
                batch.proximal, batch.behaviour, mask, **correction
            )
            weights = None if proto is None else proto.batch["rollout_is_weights"]
        return function(
            old_log_prob=getattr(batch, anchor),
            log_prob=batch.learner,
            advantages=batch.advantages,
            response_mask=mask,
            loss_agg_mode=aggregation,
            config=config,
            rollout_is_weights=weights,
        )[0]

    return loss


def verl_reinforce(**correction):
    """verl's bypass mode with REINFORCE: weights of learner / behaviour times the score function."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_reinforce
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)

    def loss(batch):
        proto, mask, _ = compute_rollout_correction_and_rejection_mask(
            batch.learner.detach(), batch.behaviour, batch.float_mask, **correction
        )
        return compute_policy_loss_reinforce(
            batch.behaviour,
            batch.learner,
            batch.advantages,
            mask,
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=proto.batch["rollout_is_weights"],
        )[0]

    return loss


# ----------------------------------------------------------------------------------------------- AReaL


def areal(*, eps_clip=0.2, eps_clip_higher=None, c_clip=None, rejection=None, level="token", anchor="proximal"):
    from areal.api.cli_args import RejectionSamplingConfig
    from areal.utils.functional import ppo_actor_loss_fn

    sampling = None if rejection is None else RejectionSamplingConfig(**rejection)

    def loss(batch):
        return ppo_actor_loss_fn(
            logprobs=batch.learner,
            proximal_logprobs=getattr(batch, anchor),
            old_logprobs=batch.behaviour,
            advantages=batch.advantages,
            eps_clip=eps_clip,
            eps_clip_higher=eps_clip_higher,
            loss_mask=batch.mask,
            c_clip=c_clip,
            rejection_sampling=sampling,
            importance_sampling_level=level,
        )[0]

    return loss


def areal_actor():
    import areal  # noqa: F401  the package itself imports without a GPU; its trainers do not

    return without_package_code("areal", "trainer.ppo.actor")


def areal_a3po(**options):
    """areal's loss on the proximal policy that its log-linear approximation gives."""
    compute_prox_logp_approximations = areal_actor().compute_prox_logp_approximations

    inner = areal(**options)

    def loss(batch):
        current = 100
        proximal = compute_prox_logp_approximations(
            old_logp=batch.behaviour,
            logprobs=batch.learner.detach(),
            versions=current - batch.lag,
            current_version=current,
            method="loglinear",
        )["loglinear"]
        return inner(Batch(**{**vars(batch), "proximal": proximal}))

    return loss


def areal_m2po(threshold):
    """areal's M2PO mask of behaviour against proximal, then its loss with clips out of reach."""
    _apply_m2po_masking = areal_actor()._apply_m2po_masking

    def loss(batch):
        from areal.utils.functional import ppo_actor_loss_fn

        mask = _apply_m2po_masking(batch.behaviour, batch.proximal, batch.mask, threshold)
        value = ppo_actor_loss_fn(
            logprobs=batch.learner,
            proximal_logprobs=batch.behaviour,
            old_logprobs=batch.behaviour,
            advantages=batch.advantages,
            eps_clip=1.0,
            eps_clip_higher=1e9,
            loss_mask=mask,
        )[0]
        return value

    return loss


def areal_m2po_mask(batch, threshold):
    _apply_m2po_masking = areal_actor()._apply_m2po_masking

    return _apply_m2po_masking(batch.behaviour, batch.proximal, batch.mask, threshold)


def areal_sapo(tau_pos=1.0, tau_neg=1.05):
    from areal.utils.functional import sapo_loss_fn

    def loss(batch):
        return sapo_loss_fn(batch.learner, batch.behaviour, batch.advantages, tau_pos, tau_neg, batch.mask)[0]

    return loss


# -------------------------------------------------------------------------------------------- OpenRLHF


def openrlhf(*, anchor="proximal", **options):
    sys.modules["deepspeed"] = types.ModuleType("deepspeed")
    try:
        PolicyLoss = without_package_code("openrlhf", "models.loss").PolicyLoss
    finally:
        del sys.modules["deepspeed"]  # transformers would take the stand-in for the real one
    module = PolicyLoss(**options)

    def loss(batch):
        return module(
            batch.learner,
            getattr(batch, anchor),
            batch.advantages,
            action_mask=batch.float_mask,
            rollout_log_probs=batch.behaviour,
        )[0]

    return loss


# ------------------------------------------------------------------------------------------------- TRL


def trl(loss_type, *, anchor="proximal", level="token", epsilon=0.2, epsilon_high=0.2, delta=None, opsm=None, **args):
    """GRPOTrainer._compute_loss on an instance that holds what the method reads, log-probs given."""
    from trl import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    defaults = {
        "delta": delta,
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    state = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": opsm,
        "importance_sampling_level": level,
        "beta": 0.0,
        "loss_type": loss_type,
        "epsilon_low": epsilon,
        "epsilon_high": epsilon_high,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 9,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(**{**defaults, **args}),
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
    }
    trainer.__dict__.update(state)

    def loss(batch):
        trainer.__dict__["_get_per_token_logps_and_entropies"] = lambda *_, **__: (
            batch.learner,
            torch.zeros_like(batch.learner),
            None,
        )
        ids = torch.zeros(batch.learner.shape, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": batch.float_mask,
            "advantages": batch.advantage,
            "old_per_token_logps": getattr(batch, anchor),
            "sampling_per_token_logps": batch.behaviour,
            "num_items_in_batch": batch.float_mask.sum(),
        }
        return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)

    return loss


# ----------------------------------------------------------------------------------------------- SkyRL


def skyrl(name, *, eps=0.2, eps_high=0.2, correction=None, rollout=True, **config):
    """A SkyRL policy loss, which is a plain sum, divided by the tokens."""
    from skyrl.backends.skyrl_train.utils import ppo_utils

    function = getattr(ppo_utils, name)
    off = {
        "tis_ratio_type": None,
        "sequence_mask_metric": None,
        "outlier_token_is_threshold_low": None,
        "outlier_token_is_threshold_high": None,
        "token_mask_is_threshold_low": None,
        "token_mask_is_threshold_high": None,
        **(correction or {}),
    }
    settings = SimpleNamespace(
        eps_clip_low=eps,
        eps_clip_high=eps_high,
        policy_loss_type="regular",
        clip_ratio_c=3.0,
        loss_reduction="sequence_mean",
        off_policy_correction=SimpleNamespace(**off),
    )
    for key, value in config.items():
        setattr(settings, key, SimpleNamespace(**value) if isinstance(value, dict) else value)

    def loss(batch):
        value, _ = function(
            batch.learner,
            batch.proximal,
            batch.advantages,
            settings,
            loss_mask=batch.float_mask,
            rollout_logprobs=batch.behaviour if rollout else None,
        )
        return value / batch.mask.sum()

    return loss
