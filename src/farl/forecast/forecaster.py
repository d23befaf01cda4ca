"""The forecaster of a training loop: three calls over the functional core.

forecaster = farl.Forecaster(model.named_parameters(), optimizer)
optimizer.step(); forecaster.observe()
for name, weight in forecaster.weights(dtype=torch.bfloat16): send(name, weight)
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from farl.errors import ConfigError, StateError
from farl.forecast import state as core
from farl.forecast.config import ForecastConfig
from farl.forecast.gate import PolicyEvidence, weigh_probe
from farl.forecast.gram import GramBand
from farl.forecast.plan import ForecastPlan

log = logging.getLogger("farl.forecast")


class Forecaster:
    """Forecasts the weights a learner will have some updates from now.

    Follows the parameters that `optimizer` updates; frozen ones cost nothing and are passed through. Tied
    parameters move once. Memory: `config.history_bytes_per_parameter` for each trained parameter.

    Args:
        named_parameters: as `model.named_parameters()` gives them, fp32 masters.
        optimizer: its steps are counted, so that an update observed twice or missed is an error.
        horizon: default number of updates to look ahead in `plan` and `weights`.
        config: all settings; or give them as keywords.
        version: learner version of the present weights.
        **settings: fields of `ForecastConfig`, for example `rule="copy"`, `lags=2`.

    Raises:
        ConfigError: for settings that cannot work, or when no parameter belongs to the optimizer.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        *,
        horizon: int = 1,
        config: ForecastConfig | None = None,
        version: int = 0,
        **settings: Any,
    ) -> None:
        if config is not None and settings:
            raise ConfigError(f"settings={sorted(settings)}: give config or keywords, not both")
        if config is None:
            settings.setdefault("max_horizon", max(horizon, 1))
            try:
                config = ForecastConfig(**settings)
            except TypeError as error:
                raise ConfigError(f"settings: {error}; see farl.forecast.ForecastConfig") from error
        self.horizon = horizon
        self._parameters = dict(named_parameters)
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._tracked = {n: p for n, p in self._parameters.items() if id(p) in owned and p.requires_grad}
        if not self._tracked:
            raise ConfigError("optimizer: owns none of the named parameters; pass those that it updates")
        self._warn_of_low_precision()
        self._state = core.init(self._tracked.items(), config, version=version)
        self._num_steps = 0
        self._hook = optimizer.register_step_post_hook(self._count_step)
        self._last: core.Observation | None = None
        self._last_plan: ForecastPlan | None = None
        self._num_holds: Counter[str] = Counter()

    def _warn_of_low_precision(self) -> None:
        low = [n for n, p in self._tracked.items() if p.dtype in (torch.bfloat16, torch.float16)]
        if low:
            warnings.warn(
                f"{len(low)} trained parameters are half precision (first {low[0]!r}): at RL learning rates most of "
                "an update is lost in rounding and cannot be forecast; pass the fp32 master weights",
                stacklevel=3,
            )

    def _count_step(self, *_: object) -> None:
        self._num_steps += 1

    @property
    def state(self) -> core.ForecastState:
        """The functional state; valid until the next `observe`."""
        return self._state

    @property
    def version(self) -> int:
        """Learner version last observed."""
        return self._state.version

    @property
    def last_observation(self) -> core.Observation | None:
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

    def observe(self, *, allow_skip: bool = False) -> core.Observation | None:
        """Takes in the weights after `optimizer.step()`; call it once for each step.

        Args:
            allow_skip: return None when the optimizer has not stepped (a loss scaler backed off), instead of
                raising. A skipped update is not a displacement and makes no version.

        Returns:
            The observation, with the prequential score of every forecast that aimed here.

        Raises:
            StateError: if the optimizer has stepped more than once, or not at all, since the last call.
        """
        if self._num_steps == 0 and allow_skip:
            return None
        if self._num_steps != 1:
            raise StateError(
                f"observe(): the optimizer made {self._num_steps} steps since the last call, exactly 1 is needed; "
                "call observe() after every step, with allow_skip=True where a step may be skipped"
            )
        self._state, self._last = core.observe(self._state, self._tracked.items())
        self._num_steps = 0
        if not self._last.finite:
            log.warning("version %d: displacement is not finite; history cleared, forecasts held", self.version)
        return self._last

    def plan(self, horizon: int | None = None) -> ForecastPlan:
        """The forecast that `weights` would ship; nothing is recorded."""
        return core.plan(self._state, self.horizon if horizon is None else horizon)

    def ship(self, plan: ForecastPlan) -> None:
        """Records that a plan is really sent, so that it is scored when its target version comes."""
        self._state = core.record(self._state, plan)
        self._last_plan = plan
        if plan.held:
            self._num_holds[plan.held.split(",")[0]] += 1

    def weights(
        self, *, horizon: int | None = None, plan: ForecastPlan | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Plans, records and streams the forecast weights of all named parameters, frozen ones unchanged.

        Args:
            horizon: updates ahead; the default of the forecaster if None.
            plan: a plan of this version to ship instead of a new one.
            dtype: cast last to this dtype; None keeps fp32.

        Returns:
            An iterator over name and tensor, in the order of `named_parameters`; consume it before the next
            `observe`.
        """
        shipped = plan if plan is not None else self.plan(horizon)
        self.ship(shipped)
        return self._with_frozen(core.stream(self._state, shipped, dtype=dtype), dtype)

    def past_weights(self, num_updates: int, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Streams the weights of `num_updates` updates ago, rebuilt from history (for the stale probe)."""
        return self._with_frozen(core.rewind(self._state, num_updates, dtype=dtype), dtype)

    def _with_frozen(
        self, leaves: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            if name in self._tracked:
                key, flat_N = next(leaves)
                assert key == name
                yield name, flat_N.view(parameter.shape)
            else:
                yield name, parameter.detach().to(dtype or parameter.dtype)

    @contextmanager
    def presented(self, leaves: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """Shows other weights through the same parameters inside a `with` block; restores the exact ones after.

        Only storage is exchanged, so the learner's own weights are untouched to the bit whatever happens.
        """
        kept = {name: p.data for name, p in self._parameters.items()}
        try:
            for name, weight in leaves:
                self._parameters[name].data = weight.to(kept[name].dtype)
            yield
        finally:
            for name, p in self._parameters.items():
                p.data = kept[name]

    def probe(
        self,
        *,
        plan_damping: float,
        logp_learner_BT: Tensor,
        logp_forecast_BT: Tensor,
        logp_stale_BT: Tensor,
        mask_BT: Tensor,
    ) -> None:
        """Feeds policy-space evidence of trajectories that a forecast drew; see `farl.forecast.gate`.

        Args:
            plan_damping: `damping` of the plan that drew them; 0 (held) brings no evidence.
            logp_learner_BT: nats of the sampled tokens under the learner at consumption.
            logp_forecast_BT: nats the sampler reported.
            logp_stale_BT: nats under `past_weights(lag)`.
            mask_BT: bool, True on sampled tokens.
        """
        if plan_damping <= 0:
            return
        evidence = weigh_probe(
            self._state.evidence,
            version=self.version,
            factor=plan_damping,
            logp_learner_BT=logp_learner_BT,
            logp_forecast_BT=logp_forecast_BT,
            logp_stale_BT=logp_stale_BT,
            mask_BT=mask_BT,
            config=self._state.config,
        )
        self._state = replace(self._state, evidence=evidence)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to forecast as this one would.

        Returns:
            `{"tensors": {name: displacements [C, N]}, "record": JSON types}`. The last weights are not in it:
            load the model before the forecaster.
        """
        s = self._state
        record = {
            "version": s.version,
            "slots": list(s.slots),
            "gram": s.gram.to_json(),
            "pending": [p.to_json() for p in s.pending],
            "incumbents": {str(h): name for h, name in s.incumbents.items()},
            "evidence": s.evidence.to_json(),
            "num_nonfinite": s.num_nonfinite,
            "num_holds": dict(self._num_holds),
            "fingerprint": _fingerprint(s.previous.values()),
        }
        return {"tensors": {name: ring.clone() for name, ring in s.history.items()}, "record": record}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the model must already hold the weights it was saved with.

        Raises:
            StateError: if leaves, shapes or the weights do not fit the saved state.
        """
        record, tensors = saved["record"], saved["tensors"]
        config = self._state.config
        fresh = core.init(self._tracked.items(), config, version=record["version"])
        for name, ring_CN in fresh.history.items():
            if name not in tensors or tensors[name].shape != ring_CN.shape or tensors[name].dtype != ring_CN.dtype:
                raise StateError(
                    f"history of {name!r}: saved state does not fit (lags, max_horizon, history_dtype or model "
                    "differ); resume with the config it was saved with"
                )
        if record["fingerprint"] != _fingerprint(fresh.previous.values()):
            raise StateError("weights differ from those the state was saved with; load the model first, then this")
        for name, ring_CN in fresh.history.items():
            ring_CN.copy_(tensors[name])
        self._state = replace(
            fresh,
            slots=tuple(record["slots"]),
            gram=GramBand.from_json(record["gram"]),
            pending=tuple(ForecastPlan.from_json(p) for p in record["pending"]),
            incumbents={int(h): name for h, name in record["incumbents"].items()},
            evidence=PolicyEvidence(**record["evidence"]),
            num_nonfinite=record["num_nonfinite"],
        )
        self._num_holds = Counter(record["num_holds"])
        self._num_steps = 0


def _fingerprint(leaves: Iterable[Tensor]) -> list[float]:
    """Sum and alternating sum of all entries: cheap, and different for different weights in practice."""
    plain = alternating = 0.0
    for leaf_N in leaves:
        plain += float(leaf_N.sum(dtype=torch.float64))
        alternating += float(leaf_N[::2].sum(dtype=torch.float64))
    return [plain, alternating]
