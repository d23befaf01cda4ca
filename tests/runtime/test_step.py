import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from farl.correct import CorrectorConfig, make_corrector
from farl.engines.transformers_engine import CausalPolicy
from farl.errors import FarlError
from farl.forecast import Forecaster, ForecastPlan
from farl.runtime.config import LearnerConfig, LoopConfig, OptimizerConfig, RolloutConfig
from farl.runtime.needs import Minibatch, evaluate_logp, gradient_norms, source_logps
from farl.runtime.step import SkipCounter, make_optimizer, probe_groups, stale_probe, update

from ..engines.tiny import sampled_batch, tiny_model


def make(config):
    model = tiny_model()
    batch = sampled_batch(model)
    with torch.no_grad():  # the learner has moved since the batch was drawn
        for p in model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    policy = CausalPolicy(model)
    batch = replace(batch, advantage_BT=torch.linspace(-1, 1, 11)[:, None] * batch.mask_BT)
    return policy, make_optimizer(policy, config.optimizer), batch


def mini(batch, **known):
    return Minibatch(batch=batch, num_fresh=batch.num_prompts, **known)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "none"},
        {"name": "ppo"},
        {"name": "decoupled_ppo", "denominator": "kept"},
        {"name": "m2po", "threshold": 1e-4},
        {"name": "bapo", "target": 1.5},
        {"name": "vcpo"},
        {"name": "tis", "base": "policy_gradient", "normalise": True},
        {"name": "gspo", "form": "direct", "clip_low": 0.1, "clip_high": 0.1},
        {"name": "matched_replay"},
        {"name": "matched_replay", "level": "sequence", "cap": 1.5},
    ],
    ids=lambda o: o["name"],
)
def test_micro_batches_make_the_same_step(options):
    results = []
    for micro in (None, 1, 2):
        config = LoopConfig(
            learner=LearnerConfig(micro_groups=micro), corrector=CorrectorConfig(**options),
            optimizer=OptimizerConfig(name="sgd", lr=0.1, beta1=0.0),
        )  # fmt: skip
        policy, optimizer, batch = make(config)
        behaviour = batch.logp_behaviour_BT
        shift = 0.2 * torch.randn(behaviour.shape, generator=torch.Generator().manual_seed(0))
        known = {
            "logp_proximal_BT": behaviour,
            "logp_sources_BTK": torch.stack([behaviour, behaviour + shift], dim=-1),
            "log_share_BK": torch.tensor([0.7, 0.3]).log().expand(len(behaviour), 2),
        }
        made = update(policy, optimizer, make_corrector(config.corrector), mini(batch, **known), config=config, lr=0.1)
        results.append((made.metrics, torch.cat([p.detach().flatten() for p in policy.module.parameters()])))
    for metrics, weights in results[1:]:
        assert torch.allclose(weights, results[0][1], atol=1e-6)
        assert metrics["optim/lr"] == pytest.approx(results[0][0]["optim/lr"], rel=1e-5)
        for name in ("loss/value", "policy/kl_nats", "correct/clip_fraction", "optim/grad_norm"):
            assert metrics[name] == pytest.approx(results[0][0][name], rel=1e-4, abs=1e-7)


def test_the_gradient_is_clipped_to_its_norm():
    config = LoopConfig(optimizer=OptimizerConfig(name="sgd", lr=1.0, beta1=0.0, max_grad_norm=0.01))
    policy, optimizer, batch = make(config)
    before = torch.cat([p.detach().flatten().clone() for p in policy.module.parameters()])
    made = update(policy, optimizer, make_corrector(config.corrector), mini(batch), config=config, lr=1.0)
    after = torch.cat([p.detach().flatten() for p in policy.module.parameters()])
    assert made.metrics["optim/grad_norm"] > 0.01, "the norm before clipping is reported"
    assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_leave_everything_alone(bad):
    config = LoopConfig()
    policy, optimizer, batch = make(config)
    before = [p.detach().clone() for p in policy.module.parameters()]
    advantage = batch.advantage_BT.clone()
    advantage[0, 0] = bad
    made = update(
        policy, optimizer, make_corrector(config.corrector), mini(replace(batch, advantage_BT=advantage)),
        config=config, lr=0.1,
    )  # fmt: skip
    assert not made.stepped
    assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))
    assert optimizer.state_dict()["state"] == {}


def test_the_step_is_scaled_by_the_corrector_and_the_rate_comes_back():
    """VCPO: a quarter of the effective samples makes half the step ("sqrt")."""
    config = LoopConfig(corrector=CorrectorConfig(name="vcpo", baseline="given"))
    policy, optimizer, batch = make(config)
    learner = evaluate_logp(policy, batch, config)
    shift = torch.zeros_like(learner)
    shift[0, 0] = -8.0  # one sequence has all the weight: ESS / B = 1 / 11
    far = replace(batch, logp_behaviour_BT=learner + shift)
    made = update(policy, optimizer, make_corrector(config.corrector), mini(far), config=config, lr=0.1)
    assert made.metrics["optim/lr"] == pytest.approx(0.1 * math.sqrt(1 / 11), rel=0.02)
    made = update(policy, optimizer, make_corrector(CorrectorConfig()), mini(batch), config=config, lr=0.1)
    assert made.metrics["optim/lr"] == 0.1


def test_gradient_norms_are_those_of_each_trajectory():
    """Against the plain way: the whole batch's graph, one row at a time."""
    config = LoopConfig()
    policy, _, batch = make(config)
    norms = gradient_norms(policy, batch, config)
    logp = policy.logp(batch, temperature=config.rollout.temperature)
    parameters = list(policy.module.parameters())
    for b in range(batch.num_sequences):
        total = (logp[b] * batch.mask_BT[b]).sum()
        gradients = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        expected = math.sqrt(sum(float(g.square().sum()) for g in gradients if g is not None))
        assert float(norms[b]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert len(norms) == 11
    empty = replace(batch, mask_BT=batch.mask_BT & (torch.arange(11) != 3)[:, None])
    assert gradient_norms(policy, empty, config)[3] == 0


def test_sources_are_the_recorded_log_probs_where_a_policy_drew_and_evaluated_ones_elsewhere():
    config = LoopConfig(learner=LearnerConfig(micro_groups=1))
    policy, _, batch = make(config)
    source = [7, *[5] * (batch.num_prompts - 1)]
    of_seven = batch.group_B == 0
    shown = []

    @contextmanager
    def presented(number):
        shown.append(number)
        with torch.no_grad():
            for p in policy.module.parameters():
                p.mul_(1 + 0.01 * number)
        yield
        with torch.no_grad():
            for p in policy.module.parameters():
                p.div_(1 + 0.01 * number)

    logp, log_share = source_logps(policy, batch, source, presented, config)
    assert shown == [7, 5], "newest first"
    assert log_share[0].exp().tolist() == pytest.approx([float(of_seven.sum()) / 11, float((~of_seven).sum()) / 11])
    own = (~of_seven).long().unsqueeze(1)
    picked = logp.gather(2, own[:, :, None].expand(-1, logp.shape[1], 1)).squeeze(2)
    assert torch.equal(picked, batch.logp_behaviour_BT)
    with presented(5):
        of_five = evaluate_logp(policy, batch, config)
    assert torch.allclose(logp[of_seven][:, :, 1], of_five[of_seven], atol=1e-5)
    alone, share = source_logps(policy, batch, [3] * batch.num_prompts, presented, config)
    assert torch.equal(alone[:, :, 0], batch.logp_behaviour_BT)
    assert float(share[0]) == 0.0
    assert shown == [7, 5, 5], "one policy needs no pass"
    assert batch.num_prompts == 3
    source_logps(policy, batch, [7, 6, 5], presented, config)
    assert shown[3:] == [7, 6, 5], "weights are exchanged once a policy, also where its groups stand in the middle"


def test_shares_count_the_groups_that_taught_something():
    """Only those are ever stored, so the fresh policy must not get a share for its others."""
    config = LoopConfig()
    policy, _, batch = make(config)
    sizes = torch.bincount(batch.group_B).tolist()
    source = [2, 2, *[1] * (len(sizes) - 2)]
    no_advantage = batch.advantage_BT * (batch.group_B != 0).unsqueeze(1)
    _, log_share = source_logps(
        policy, replace(batch, advantage_BT=no_advantage), source, lambda _: nullcontext(), config
    )
    assert log_share[0].exp().tolist() == pytest.approx([sizes[1] / sum(sizes[1:]), sum(sizes[2:]) / sum(sizes[1:])])
    only_old = batch.advantage_BT * (batch.group_B > 1).unsqueeze(1)
    logp, log_share = source_logps(
        policy, replace(batch, advantage_BT=only_old), source, lambda _: nullcontext(), config
    )
    assert logp.shape[2] == 1, "a policy without a share is not in the mixture"
    assert float(log_share[0]) == 0.0
    logp, _ = source_logps(policy, replace(batch, advantage_BT=0 * only_old), source, lambda _: nullcontext(), config)
    assert logp.shape[2] == 2


class Counting(CausalPolicy):
    """Counts passes, and the sequences in each."""

    def __init__(self, model):
        super().__init__(model)
        self.sizes = []

    def logp(self, batch, *, temperature):
        self.sizes.append(batch.num_sequences)
        return super().logp(batch, temperature=temperature)


@pytest.mark.parametrize(("name", "micro", "passes"), [("m2po", None, 1), ("m2po", 1, 2), ("none", None, 1)])
def test_batch_statistics_cost_a_pass_only_under_micro_batches(name, micro, passes):
    config = LoopConfig(corrector=CorrectorConfig(name=name), learner=LearnerConfig(micro_groups=micro))
    policy, optimizer, batch = make(config)
    policy = Counting(policy.module)
    update(policy, optimizer, make_corrector(config.corrector), mini(batch), config=config, lr=0.1)
    assert sum(policy.sizes) == passes * batch.num_sequences


def test_a_large_batch_is_evaluated_in_pieces_of_an_update():
    config = LoopConfig(rollout=RolloutConfig(prompts_per_batch=2))
    policy, _, batch = make(config)
    whole = policy.logp(batch, temperature=1.0)
    policy = Counting(policy.module)
    assert torch.allclose(evaluate_logp(policy, batch, config), whole, atol=1e-6)
    sizes = torch.bincount(batch.group_B).tolist()
    assert policy.sizes == [sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2)]


@pytest.mark.parametrize("odd", [math.nan, -math.inf])
def test_a_sampler_that_loses_a_log_prob_does_not_end_an_update(odd):
    config = LoopConfig(corrector=CorrectorConfig(name="ppo"), learner=LearnerConfig(probe_fraction=1.0))
    policy, optimizer, batch = make(config)
    behaviour = batch.logp_behaviour_BT.clone()
    behaviour[1, 0] = odd
    batch = replace(batch, logp_behaviour_BT=behaviour)
    forecaster = Forecaster(policy.module.named_parameters(), optimizer, rule="stale")
    plan = ForecastPlan(base_version=0, horizon=0, rule="stale")
    probed = {}

    def probe(logp):
        probed.update(stale_probe(policy, forecaster, mini(batch), logp, plan, config))

    made = update(
        policy, optimizer, make_corrector(config.corrector), mini(batch), config=config, lr=0.1, before_step=probe
    )
    assert made.stepped
    assert made.metrics["correct/mask_fraction"] == pytest.approx(1 / int(batch.mask_BT.sum()))
    assert all(math.isfinite(v) for v in (*made.metrics.values(), *probed.values()))
    assert all(torch.isfinite(p).all() for p in policy.module.parameters())


def test_an_empty_completion_takes_part_without_effect():
    config = LoopConfig(optimizer=OptimizerConfig(name="sgd", lr=0.1, beta1=0.0))
    policy, optimizer, batch = make(config)
    empty = batch.mask_BT.clone()
    empty[2] = False
    batch = replace(batch, mask_BT=empty, advantage_BT=batch.advantage_BT * empty)
    made = update(policy, optimizer, make_corrector(config.corrector), mini(batch), config=config, lr=0.1)
    assert made.stepped
    assert all(torch.isfinite(p).all() for p in policy.module.parameters())
    assert all(math.isfinite(v) for v in made.metrics.values())


def followed_learner(**settings):
    """A policy followed by the rule `copy`, a batch it sampled, and a function that makes an update on it."""
    model = tiny_model()
    policy, batch = CausalPolicy(model), sampled_batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    forecaster = Forecaster(model.named_parameters(), optimizer, rule="copy", **settings)

    def step():
        optimizer.zero_grad()
        (policy.logp(batch, temperature=1.0) * batch.mask_BT).sum().neg().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        forecaster.observe()

    return policy, forecaster, batch, step


def test_the_stale_probe_measures_the_weights_of_dispatch_time():
    """Method 3b: KL and ESS as they would have been without the forecast."""
    policy, forecaster, batch, step = followed_learner()
    config = LoopConfig(learner=LearnerConfig(probe_fraction=1.0))
    step()
    plan = forecaster.plan()
    before = policy.logp(batch, temperature=1.0).detach()
    step()
    learner = policy.logp(batch, temperature=1.0).detach()
    batch = replace(batch, logp_behaviour_BT=learner)  # as if a perfect forecast had drawn it
    measured = stale_probe(policy, forecaster, mini(batch), learner, plan, config)
    mask, ratio = batch.mask_BT, learner - before
    assert measured["policy/kl_probe_nats"] == 0.0
    expected = (torch.expm1(ratio) - ratio)[mask].mean()
    assert measured["policy/kl_stale_nats"] == pytest.approx(float(expected), rel=1e-3)
    assert measured["policy/ess_probe_fraction"] == pytest.approx(1.0)
    assert 0 < measured["policy/ess_stale_fraction"] < 1
    assert forecaster.state.evidence[1].num_probes == 1
    off = LoopConfig(learner=LearnerConfig(probe_fraction=0.0))
    assert stale_probe(policy, forecaster, mini(batch), learner, plan, off) == {}


def test_a_held_forecast_is_probed_by_the_one_kept_back():
    policy, forecaster, batch, step = followed_learner(lags=2)
    config = LoopConfig(learner=LearnerConfig(probe_fraction=1.0))
    step()
    moving = forecaster.plan()
    with forecaster.presented(forecaster.weights(plan=moving)):
        shadow = policy.logp(batch, temperature=1.0).detach()
    stale = policy.logp(batch, temperature=1.0).detach()
    held = replace(moving, terms={}, shadow=moving.terms, held="a test", damping=0.0)
    step()
    learner = policy.logp(batch, temperature=1.0).detach()
    batch = replace(batch, logp_behaviour_BT=stale)
    measured = stale_probe(policy, forecaster, mini(batch), learner, held, config)
    assert measured["policy/kl_probe_nats"] == measured["policy/kl_stale_nats"] > 0
    evidence = forecaster.state.evidence[1]
    mask = batch.mask_BT
    assert evidence.drift == pytest.approx(float((learner - stale)[mask].square().sum()), rel=1e-3)
    assert evidence.move == pytest.approx(float((shadow - stale)[mask].square().sum()), rel=2e-2)


def test_probes_visit_every_group_in_turn():
    seen = {g for version in range(8) for g in range(*probe_groups(8, 0.125, version))}
    assert seen == set(range(8))
    amortised = [probe_groups(4, 0.125, version) for version in range(8)]
    assert amortised == [(0, 1), None, (1, 2), None, (2, 3), None, (3, 4), None], "half a group is one every other time"
    assert probe_groups(4, 0.0, 0) is None
    assert probe_groups(4, 1.0, 3) == (0, 4)


def test_skips_in_a_row_end_the_run_and_single_ones_do_not():
    skips = SkipCounter(2)
    for stepped in (False, False, True, False, False):
        skips.note(stepped)
        skips.refuse()
    assert skips.total == 4
    skips.note(False)
    with pytest.raises(FarlError, match="lower optimizer.lr"):
        skips.refuse()
