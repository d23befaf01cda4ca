"""The authors' own files that are on no package index, beside ours: BAPO, VCPO and Archer2.0 (ASPO).

    git clone https://github.com/WooooDyy/BAPO ; git clone https://github.com/mit-han-lab/vcpo
    git clone https://github.com/wizard-III/Archer2.0
    .venv-parity/bin/python -m parity.authors --bapo BAPO --vcpo vcpo --archer Archer2.0

Prints the largest differences over 200 random batches, as `make parity` does for libraries.
"""

import argparse
import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import torch

from farl.correct.adapt import ess_fraction, optimal_baseline

from .test_parity import BATCHES, ours, random_batch, relative, value_and_gradient


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem + "_authors", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compare(name, theirs, mine, *, values=True):
    worst_value = worst_gradient = 0.0
    for seed in range(BATCHES):
        batch = random_batch(seed)
        (their_value, their_gradient), (value, gradient) = (value_and_gradient(f, batch) for f in (theirs, mine))
        floor = float(batch.advantage.abs().mean())
        worst_value = max(worst_value, relative(value, their_value, floor))
        worst_gradient = max(worst_gradient, relative(gradient, their_gradient, 1e-3 * floor))
    shown = f"value {worst_value:.1e}  " if values else ""
    print(f"{name:24} {shown}gradient {worst_gradient:.1e}")


def bapo(root: Path):
    module = load(root / "recipe/bapo/policy_loss.py")
    for target in (0.5, 1.0, 2.0):
        bounds = {"ratio_lower_start": 0.6, "ratio_lower_max": 0.8, "ratio_lower_step": 0.05}
        bounds |= {"ratio_upper_start": 1.2, "ratio_upper_max": 2.0, "ratio_upper_step": 0.05}
        settings = SimpleNamespace(**bounds, adv_ratio_target=target, eps=1e-8)
        config = SimpleNamespace(policy_loss=settings, get=lambda key, default: default)

        def theirs(b, config=config):
            return module.compute_policy_loss_bapo(b.behaviour, b.learner, b.advantages, b.float_mask, config=config)[0]

        compare(f"bapo, target {target}", theirs, ours("bapo", {"target": target}))


def aspo(root: Path):
    module = load(root / "verl/trainer/ppo/core_algos.py")

    def theirs(b):
        low_entropy = torch.ones_like(b.mask)
        return module.compute_policy_loss_archer(b.behaviour, b.learner, b.advantages, b.mask, low_entropy)[0]

    compare("aspo (archer)", theirs, ours("aspo", {}), values=False)  # values of its cut tokens are scores


def vcpo(root: Path):
    state = types.ModuleType("megatron.core.parallel_state")
    state.get_data_parallel_group = lambda **_: None
    state.get_tensor_model_parallel_rank = state.get_pipeline_model_parallel_rank = lambda: 0
    core = types.ModuleType("megatron.core")
    core.parallel_state = state
    sys.modules |= {"megatron": types.ModuleType("megatron"), core.__name__: core, state.__name__: state}
    import verl.utils.torch_functional as functional

    functional.allgather_dict_into_list = lambda records, group=None: records
    module = load(root / "recipe/fully_async_policy/staleness_utils.py")
    identity = {"epoch_idx": 0, "minibatch_idx": 0, "trainer_global_step": 0, "trainer_local_step": 0}
    identity |= {"param_version_start": 0, "param_version_end": 0, "trainer_param_version": 0}
    identity |= {"response_length": 1, "prompt_length": 1, "advantage_scalar": 0.0}
    worst_baseline = worst_ess = 0.0
    for seed in range(BATCHES):
        generator = torch.Generator().manual_seed(seed)
        batch = random_batch(seed)
        norm, reward = (torch.rand(6, generator=generator).double() + 0.1 for _ in range(2))
        records = module.TrajRecordList()
        for i in range(6):
            record = module.TrajRecord(uid=i, group_uid=i // 3, reward_scalar=float(reward[i]), **identity)
            learner = batch.learner.detach()
            record = module.compute_is_info(record, batch.behaviour[i], learner[i], batch.mask[i], 8.0)
            record.grad_norm_unscaled = float(norm[i])
            records.append(record)
        weight = torch.tensor([r.rollout_seq_is for r in records]).double()
        mine = optimal_baseline(weight, norm, reward, torch.arange(6) // 3, 2)
        theirs = [module.compute_opob_baseline(records, group) for group in (0, 1)]
        worst_baseline = max(worst_baseline, *(abs(float(mine[g]) - theirs[g]) for g in (0, 1)))
        ratio = module.compute_ess_info(records, 8.0)["ess_ratio"]
        worst_ess = max(worst_ess, abs(ratio - ess_fraction(weight)))
    print(f"{'vcpo (its eps is 1e-8)':24} baseline {worst_baseline:.1e}  ESS fraction {worst_ess:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checks = {"bapo": bapo, "vcpo": vcpo, "archer": aspo}
    for name in checks:
        parser.add_argument(f"--{name}", type=Path, help="a clone of the authors' repository")
    arguments = parser.parse_args()
    for name, check in checks.items():
        if getattr(arguments, name):
            check(getattr(arguments, name))


if __name__ == "__main__":
    main()
