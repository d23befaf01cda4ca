"""The forecaster of a training loop: three calls over the functional core.

forecaster = farl.Forecaster(model.named_parameters(), optimizer)
optimizer.step(); forecaster.observe()
for name, weight in forecaster.weights(dtype=torch.bfloat16): send(name, weight)
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from farl.errors import StateError
from farl.forecast import saving
from farl.forecast.aim import Horizon
from farl.forecast.config import ForecastConfig
from farl.forecast.follow import follow, settle_config
from farl.forecast.gate import weigh_probe
from farl.forecast.lora import find_adapters
from farl.forecast.masters import HALF, Masters
from farl.forecast.moments import Moments
from farl.forecast.observe import Observation, observe, require_unmoved
from farl.forecast.plan import ForecastPlan
from farl.forecast.planning import evidence_of, plan
from farl.forecast.sample import Reduce
from farl.forecast.sharded import exchange, reshard
from farl.forecast.state import ForecastState, init, record, unsharded
from farl.forecast.steps import StepCounter
from farl.forecast.stream import rewind, stream
from farl.forecast.whole import WholeModel

log = logging.getLogger("farl.forecast")


class Forecaster:
    """Forecasts the weights a learner will have some updates from now.

    Follows the parameters that the optimizer updates; frozen ones cost nothing and are passed through, as are those
    that are not floating point. Tied parameters move once. DTensor parameters (FSDP2, tensor parallel) are followed
    shard by shard on their own rank. Memory: `config.history_bytes_per_parameter` for each trained parameter.

    Args:
        named_parameters: as `model.named_parameters()` gives them.
        optimizer: one, or several that step together; their steps are counted, so that an update observed twice or
            missed is an error.
        horizon: default number of updates to look ahead in `plan` and `weights`.
        config: all settings; or give them as keywords.
        version: learner version of the present weights.
        masters: `(name, parameter) -> fp32 master` or a mapping, where the parameters are half precision; masters that
            the optimizer keeps in its state under a known name are found without.
        lora_products: the model that peft returned, to forecast what its adapters add to their weights instead of their
            factors; `weights` then yields merged weights and no factors.
        lr_schedule: `version -> learning rate of the update that makes version + 1`, where it is known beforehand.
        **settings: fields of `ForecastConfig`, for example `rule="copy"`, `lags=2`.

    Raises:
        ConfigError: for settings that cannot work, or when no parameter belongs to the optimizer.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        horizon: Horizon = 1,
        config: ForecastConfig | None = None,
        version: int = 0,
        masters: Masters | None = None,
        lr_schedule: Callable[[int], float] | None = None,
        lora_products: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._adapters = find_adapters(lora_products) if lora_products is not None else []
        config = settle_config(config, settings, optimizers, horizon, has_products=bool(self._adapters))
        self.horizon = horizon
        self._lr_schedule = lr_schedule
        self._masters = masters
        self._parameters = dict(named_parameters)
        self._followed = follow(self._parameters, optimizers, masters, self._adapters)
        self._state = self._start(config, version)
        self._steps = StepCounter(optimizers)
        self._leaf_steps = self._count_leaf_steps()
        self._own_masters = self._masterless()
        self._last: Observation | None = None
        self._last_plan: ForecastPlan | None = None
        self._num_holds: Counter[str] = Counter()

    def _start(self, config: ForecastConfig, version: int) -> ForecastState:
        followed = self._followed
        return init(followed.leaves(), config, version=version, replicas=followed.replicas, reduce=self._reduce)

    def _restart(self, version: int) -> None:
        """History begins anew at present weights; what was learnt about the policy stays."""
        fresh = self._start(self.config, version)
        self._state = replace(fresh, evidence=self._state.evidence, num_nonfinite=self._state.num_nonfinite)
        self._leaf_steps = self._count_leaf_steps()
        self._own_masters = self._masterless()

    @property
    def _reduce(self) -> Reduce:
        return self._followed.reduce or unsharded

    @property
    def _whole(self) -> WholeModel:
        return WholeModel(self._parameters, self._followed)

    def _moments(self) -> dict[str, Moments]:
        return self._followed.moments(self._steps.rates)

    def _streamed_moments(self) -> dict[str, Moments]:
        """Optimizer state for the rule that streams from it; others have read what they need when they observed."""
        return self._moments() if self.config.rule == "moments" else {}

    def _count_leaf_steps(self) -> dict[str, int]:
        return {name: m.step for name, m in self._moments().items()}

    def _masterless(self) -> frozenset[str]:
        """Half-precision leaves that are followed themselves."""
        masters = self._followed.masters
        tracked = self._followed.tracked
        return frozenset(n for n, m in masters.items() if m is tracked[n] and m.dtype in HALF)

    @property
    def state(self) -> ForecastState:
        """The functional state; valid until the next `observe`."""
        return self._state

    @property
    def config(self) -> ForecastConfig:
        """The settings in force; where an optimizer is not understood they fall back to history, and say so."""
        return self._state.config

    @property
    def version(self) -> int:
        """Learner version last observed."""
        return self._state.version

    @property
    def last_observation(self) -> Observation | None:
        """What the last `observe` learnt; None before the first."""
        return self._last

    @property
    def last_plan(self) -> ForecastPlan | None:
        """The plan last shipped by `weights` or `ship`."""
        return self._last_plan

    @property
    def num_holds(self) -> Mapping[str, int]:
        """Forecasts held so far, by reason without version numbers."""
        return dict(self._num_holds)

    @property
    def streams_live_weights(self) -> bool:
        """Whether `weights` reads the learner's own tensors: finish its iterator before the next optimizer step."""
        return not self._state.previous

    def add(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Follows parameters that came later: of a new module, unfrozen and given to the optimizer, or replaced.

        Where that changes what is followed, history begins anew: forecasts are held for one update.

        Args:
            named_parameters: new ones, or all; a name that is known stands for what it names now.
        """
        self._parameters |= dict(named_parameters)
        before = {name: id(p) for name, p in self._followed.tracked.items()}
        self._followed = follow(self._parameters, self._followed.optimizers, self._masters, self._adapters)
        self._steps = StepCounter(self._followed.optimizers)  # they may have new groups
        if before != {name: id(p) for name, p in self._followed.tracked.items()}:
            self._restart(self.version)

    def observe(self, *, allow_skip: bool = False) -> Observation | None:
        """Takes in the weights after `optimizer.step()`; call it once for each step, before gradients are cleared.

        Args:
            allow_skip: return None when no optimizer has stepped (a loss scaler backed off), instead of raising. A
                skipped update is not a displacement and makes no version.

        Returns:
            The observation, with the prequential score of every forecast that aimed here.

        Raises:
            StateError: if the optimizer has stepped more than once, or not at all, since the last call; if the weights
                moved without it; or if it owns parameters that the forecaster does not know.
        """
        if allow_skip and not self._steps.any:
            require_unmoved(self._state, self._followed.leaves(), reduce=self._reduce)
            return None
        self._steps.require_one(allow_skip=allow_skip)
        self._followed.require_complete()
        if any(m is not self._followed.tracked[n] for n, m in self._followed.masters.items() if n in self._own_masters):
            log.info("version %d: the optimizer has made fp32 masters; history begins with them", self.version + 1)
            self._steps.clear()
            self._restart(self.version + 1)
            self._last = Observation(version=self.version, displacement=math.nan, finite=True, scored=())
            return self._last
        moments = self._moments()
        tells = self.config.source == "optimizer" and self.config.rule != "moments"
        needs_gradients = self.config.metric != "euclidean" and not self._followed.keeps_curvature
        self._state, self._last = observe(
            self._state,
            self._followed.leaves(),
            moments=moments,
            idle=self._followed.idle(moments, self._leaf_steps) if tells else (),
            gradients=self._followed.gradients() if needs_gradients else None,
            lr=self._followed.rate(self._steps.rates),
            reduce=self._reduce,
        )
        self._leaf_steps = {name: m.step for name, m in moments.items()}
        self._steps.clear()
        if not self._last.finite:
            log.warning("version %d: displacement is not finite; history cleared, forecasts held", self.version)
        return self._last

    def plan(self, horizon: Horizon | None = None) -> ForecastPlan:
        """The forecast that `weights` would ship; nothing is recorded."""
        coming: list[float] = []
        last = self._steps.rates[0][0]
        if self._lr_schedule is not None and last > 0:
            scale = self._followed.rate(self._steps.rates) / last  # the schedule is of the first group
            coming = [scale * self._lr_schedule(self.version + i) for i in range(self.config.max_horizon)]
        return plan(self._state, self.horizon if horizon is None else horizon, coming_lrs=coming)

    def ship(self, plan: ForecastPlan) -> None:
        """Records that a plan is really sent, so that it is scored when its target version comes."""
        self._state = record(self._state, plan, self._followed.leaves(), moments=self._streamed_moments())
        self._last_plan = plan
        if plan.held:
            self._num_holds[plan.held.split(",")[0]] += 1

    def weights(
        self,
        *,
        horizon: Horizon | None = None,
        plan: ForecastPlan | None = None,
        dtype: torch.dtype | None = None,
        into: Mapping[str, Tensor] | None = None,
        gather: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Plans, records and streams the forecast weights of all named parameters, frozen ones unchanged.

        Args:
            horizon: updates ahead; the default of the forecaster if None.
            plan: a plan of this version to ship instead of a new one.
            dtype: cast last to this dtype; None keeps fp32.
            into: contiguous tensors to write to, by name, each of whatever dtype and like its parameter or shard in
                shape and device: a buffer that is used again spares the page faults of a new one. Names without one
                get a new tensor.
            gather: whole tensors instead of DTensor shards, one at a time; a collective, so call it on every rank.

        Returns:
            An iterator over name and tensor, in the order of `named_parameters`; consume it before the next
            `observe`.

        Raises:
            StateError: for tensors to write to that do not fit, or together with `gather`; before anything is recorded.
        """
        whole = self._whole
        targets = whole.require_targets(into or {}, gather=gather)
        shipped = plan if plan is not None else self.plan(horizon)
        self.ship(shipped)
        leaves = stream(
            self._state,
            shipped,
            self._followed.leaves(),
            moments=self._streamed_moments(),
            dtype=dtype,
            into={name: target.view(-1) for name, target in targets.items() if name in whole.written},
        )
        return whole.parameters_of(leaves, dtype, gather=gather, targets=targets)

    def past_weights(self, num_updates: int, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Streams the weights of `num_updates` updates ago, rebuilt from history (for the stale probe)."""
        leaves = rewind(
            self._state, num_updates, self._followed.leaves(), moments=self._streamed_moments(), dtype=dtype
        )
        return self._whole.beside_adapters(leaves, dtype)

    def can_probe(self, plan: ForecastPlan) -> bool:
        """Whether `probe_weights` has something to tell about a plan: it moved or has a shadow, and history reaches."""
        reaches = self.version - plan.base_version <= self._state.num_rewindable
        return reaches and plan.horizon > 0 and (plan.moves or any(plan.shadow.values()))

    def probe_weights(self, plan: ForecastPlan, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """What to compare a batch with: stale weights if its plan moved, the kept-back forecast if it was held.

        Args:
            plan: that drew the batch.
            dtype: the wire's, so that what was not sent is rounded as what was sent; None where nothing is rounded.
        """
        back = self.version - plan.base_version
        leaves = rewind(
            self._state,
            back,
            self._followed.leaves(),
            moments=self._streamed_moments(),
            then=plan if plan.held else None,
            dtype=dtype,
        )
        return self._whole.beside_adapters(leaves, dtype)

    @contextmanager
    def presented(self, leaves: Iterable[tuple[str, Tensor]], *, module: nn.Module | None = None) -> Iterator[None]:
        """Shows other weights through the same parameters inside a `with` block; restores the exact ones after.

        Plain parameters exchange storage, so the learner's own weights are untouched to the bit whatever happens.

        Args:
            leaves: names and weights.
            module: the FSDP2 module that the parameters belong to, which may hold whole copies of them; not needed for
                others.
        """
        kept: dict[str, Tensor] = {}
        reshard(module)
        try:
            for name, weight in leaves:
                kept[name] = exchange(self._parameters[name], weight)
            yield
        finally:
            for name, weight in reversed(kept.items()):  # a tied parameter was exchanged twice
                exchange(self._parameters[name], weight)
            reshard(module)

    def probe(
        self,
        plan: ForecastPlan,
        *,
        logp_learner_BT: Tensor,
        logp_behaviour_BT: Tensor,
        logp_probe_BT: Tensor,
        mask_BT: Tensor,
    ) -> None:
        """Feeds policy-space evidence of trajectories that a plan drew; see `farl.forecast.gate`.

        What the sampler's engine and the learner's make of the same weights should agree well beyond the KL from lag;
        where it does not, give the log-probs of both forecasts and stale weights from one engine.

        Args:
            plan: the plan whose weights drew them, with `can_probe`.
            logp_learner_BT: nats of the sampled tokens under the learner at consumption.
            logp_behaviour_BT: nats the sampler reported.
            logp_probe_BT: nats under `probe_weights(plan)`.
            mask_BT: bool, True on sampled tokens.
        """
        sent = plan.moves
        evidence = weigh_probe(
            evidence_of(self._state, plan.key),
            version=self.version,
            logp_learner_BT=logp_learner_BT,
            logp_forecast_BT=logp_behaviour_BT if sent else logp_probe_BT,
            logp_stale_BT=logp_probe_BT if sent else logp_behaviour_BT,
            mask_BT=mask_BT,
            damping=plan.damping if sent else 1.0,
            sent=sent,
            config=self.config,
        )
        self._state = replace(self._state, evidence={**self._state.evidence, plan.key: evidence})

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to forecast as this one would.

        Returns:
            `{"tensors": {name: tensor}, "record": JSON types}`. The last weights are not in it: load the model and the
            optimizer before the forecaster.

        Raises:
            StateError: between a step and its `observe`, whose displacement would be lost.
        """
        if self._steps.any:
            raise StateError("state_dict(): the optimizer has stepped since the last observe(); call observe() first")
        saved = saving.to_dict(self._state, num_holds=dict(self._num_holds), leaves=self._followed.leaves())
        saved["record"]["rates"] = [list(lrs) for lrs in self._steps.rates]
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the model must already hold the weights it was saved with.

        Raises:
            StateError: if leaves, shapes or the weights do not fit the saved state.
        """
        version = saving.version_of(saved)
        fresh = self._start(self.config, version)
        self._state = saving.from_dict(saved, fresh, leaves=self._followed.leaves())
        self._num_holds = Counter(saved["record"]["num_holds"])
        self._steps.clear()
        self._steps.rates = [tuple(lrs) for lrs in saved["record"]["rates"]]
        self._leaf_steps = self._count_leaf_steps()
        self._own_masters = self._masterless()
