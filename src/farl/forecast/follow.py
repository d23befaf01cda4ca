"""Between a model with its optimizers and the functional core: which leaves are followed, and what is known of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from farl.errors import ConfigError, StateError
from farl.forecast.aim import Horizon, aim_of
from farl.forecast.config import ForecastConfig
from farl.forecast.lora import Adapter, products
from farl.forecast.masters import Masters, find_master, warn_of_half_precision
from farl.forecast.moments import Moments, read_moments, refuse_amsgrad, understands
from farl.forecast.sample import Reduce
from farl.forecast.sharded import layout, local

log = logging.getLogger("farl.forecast")


@dataclass(frozen=True, kw_only=True, eq=False)
class Followed:
    """The trained leaves of a model.

    Attributes:
        tracked: parameters by name.
        masters: the full-precision tensor of each, the parameter itself where it has no other.
        optimizers: that update them.
        replicas: ranks that hold the same copy of a leaf, where it is not 1.
        reduce: adds over ranks; None where nothing is sharded.
        adapters: those whose products are followed in place of their factors; their weights are among `tracked`.
        parameters: all of the model, by name; needed for adapters alone.
    """

    tracked: Mapping[str, Tensor]
    masters: Mapping[str, Tensor]
    optimizers: list[torch.optim.Optimizer]
    replicas: Mapping[str, int]
    reduce: Reduce | None
    adapters: tuple[Adapter, ...] = ()
    parameters: Mapping[str, Tensor] = field(default_factory=dict)

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's shard of every full-precision leaf; for adapters what they add to a weight."""
        yield from self.products().items()
        yield from ((name, local(master.detach())) for name, master in self.masters.items())

    def products(self) -> dict[str, Tensor]:
        """What the followed adapters add to their weights now, by the weights' names."""
        return products(self.adapters, self.parameters)

    @property
    def factors(self) -> frozenset[str]:
        """Names of the factors that products stand for."""
        return frozenset(name for adapter in self.adapters for name in (adapter.a, adapter.b))

    @property
    def keeps_curvature(self) -> bool:
        """Whether every optimizer keeps a second moment; of some alone the scales would not compare."""
        return not self.adapters and all(isinstance(o, torch.optim.Adam) for o in self.optimizers)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients that are still there, by leaf."""
        found = {n: m.grad if m.grad is not None else self.tracked[n].grad for n, m in self.masters.items()}
        return {name: local(gradient) for name, gradient in found.items() if gradient is not None}

    def moments(self) -> dict[str, Moments]:
        """Optimizer state of every leaf that has one, this rank's shards."""
        found: dict[str, Moments] = {}
        names = {id(t): name for tensors in (self.tracked, self.masters) for name, t in tensors.items()}
        for optimizer in self.optimizers:
            if not understands(optimizer):
                continue
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    moments = read_moments(optimizer, group, parameter) if id(parameter) in names else None
                    if moments is not None:
                        found[names[id(parameter)]] = _local_moments(moments)
        return found

    def require_complete(self) -> None:
        """Raises `StateError` if the optimizers own a parameter that is not followed."""
        known = {id(t) for tensors in (self.tracked, self.masters) for t in tensors.values()}
        known |= {id(self.parameters[name]) for name in self.factors}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in known and parameter.requires_grad and parameter.is_floating_point():
                        raise StateError(
                            f"observe(): the optimizer owns a parameter of shape {tuple(parameter.shape)} that the "
                            "forecaster does not follow; call forecaster.add(model.named_parameters()) after adding it"
                        )


def _local_moments(moments: Moments) -> Moments:
    first = None if moments.first_N is None else local(moments.first_N)
    second = None if moments.second_N is None else local(moments.second_N)
    return replace(moments, first_N=first, second_N=second)


def follow(
    parameters: Mapping[str, Tensor],
    optimizers: list[torch.optim.Optimizer],
    masters: Masters | None,
    adapters: Sequence[Adapter] = (),
) -> Followed:
    """Finds the leaves to follow: named, trained, floating point, and updated by an optimizer.

    Args:
        parameters: of the model, by name.
        optimizers: that update them.
        masters: as `find_master` takes them.
        adapters: whose products are followed in place of their factors.

    Raises:
        ConfigError: if there is none.
    """
    factors = {name for adapter in adapters for name in (adapter.a, adapter.b)}
    owned = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    tracked, full = {}, {}
    for name, parameter in parameters.items():
        if not parameter.is_floating_point() or name in factors:
            continue
        master = find_master(name, parameter, optimizers, masters)
        if (id(parameter) in owned or id(master) in owned) and (parameter.requires_grad or master.requires_grad):
            tracked[name], full[name] = parameter, master
    if not tracked and not adapters:
        raise ConfigError("optimizer: owns none of the named parameters; pass those that it updates")
    warn_of_half_precision(full)
    replicas, reduce = layout(full)
    weights = {adapter.weight: parameters[adapter.weight] for adapter in adapters}
    return Followed(
        tracked=weights | tracked,
        masters=full,
        optimizers=optimizers,
        replicas=replicas,
        reduce=reduce,
        adapters=tuple(adapters),
        parameters=parameters,
    )


def settle_config(
    config: ForecastConfig | None,
    settings: Mapping[str, Any],
    optimizers: list[torch.optim.Optimizer],
    horizon: Horizon,
    *,
    has_products: bool = False,
) -> ForecastConfig:
    """The config in force: from keywords or whole, and history where an optimizer is not understood.

    Raises:
        ConfigError: for both at once, an unknown keyword, a horizon that cannot be, or amsgrad or LoRA products where
            the closed form is asked for.
    """
    if config is not None and settings:
        raise ConfigError(f"settings={sorted(settings)}: give config or keywords, not both")
    if config is None:
        try:
            config = ForecastConfig(**{"max_horizon": max(aim_of(horizon).reach, 1), **settings})
        except TypeError as error:
            raise ConfigError(f"settings: {error}; see farl.forecast.ForecastConfig") from error
    closed_form = config.rule == "moments" or config.source == "optimizer"
    if not closed_form:
        return config
    if has_products:
        raise ConfigError(
            "lora_products: the optimizer knows factors, not their products; forecast from history "
            "(source='weights'), or forecast the factors"
        )
    for optimizer in optimizers:
        refuse_amsgrad(optimizer)
    strange = sorted({type(o).__name__ for o in optimizers if not understands(o)})
    if not strange:
        return config
    rule = "auto" if config.rule == "moments" else config.rule
    log.warning(
        "%s has no closed form here: forecasting from history (rule=%r, source='weights') instead",
        ", ".join(strange),
        rule,
    )
    return replace(config, rule=rule, source="weights")
