"""Between a model with its optimizers and the functional core: which leaves are followed, and what is known of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from farl.errors import ConfigError, StateError
from farl.forecast.aim import Horizon, aim_of, require_reach
from farl.forecast.config import ForecastConfig
from farl.forecast.lora import Adapter, products
from farl.forecast.masters import Masters, find_master, warn_of_half_precision
from farl.forecast.moments import Moments, read_moments, refuse_amsgrad, understands
from farl.forecast.sample import Reduce
from farl.forecast.sharded import layout, local
from farl.forecast.steps import Rates

log = logging.getLogger("farl.forecast")


@dataclass(frozen=True, kw_only=True, eq=False)
class Followed:
    """The trained leaves of a model.

    Attributes:
        tracked: parameters by name, tied ones by their first.
        aliases: first name of every further name of a tied parameter.
        given: the user's masters, as `find_master` takes them.
        optimizers: that update them.
        replicas: ranks that hold the same copy of a leaf, where it is not 1.
        reduce: adds over ranks; None where nothing is sharded.
        adapters: those whose products are followed in place of their factors; their weights are among `tracked`.
        parameters: all of the model, by name; needed for adapters alone.
    """

    tracked: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    given: Masters | None
    optimizers: list[torch.optim.Optimizer]
    replicas: Mapping[str, int]
    reduce: Reduce | None
    adapters: tuple[Adapter, ...] = ()
    parameters: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def masters(self) -> dict[str, Tensor]:
        """The full-precision tensor of each parameter now, itself where it has no other.

        Looked up anew each time: optimizers make masters at their first step, and replace them when they are loaded.
        """
        products_of = {adapter.weight for adapter in self.adapters}
        return {
            name: find_master(name, parameter, self.optimizers, self.given)
            for name, parameter in self.tracked.items()
            if name not in products_of
        }

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

    def moments(self, rates: Rates) -> dict[str, Moments]:
        """Optimizer state of every leaf that has one, this rank's shards, with the learning rates of the last step."""
        found: dict[str, Moments] = {}
        names = self._names()
        for optimizer, lrs in zip(self.optimizers, rates, strict=True):
            if not understands(optimizer):
                continue
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                for parameter in group["params"]:
                    moments = read_moments(optimizer, group, parameter) if id(parameter) in names else None
                    if moments is not None:
                        found[names[id(parameter)]] = _local_moments(replace(moments, lr=lr))
        return found

    def rate(self, rates: Rates) -> float:
        """One learning rate for the update: the mean over followed weights, so that a group at rate 0 hides nothing."""
        names, total, count = self._names(), 0.0, 0
        for optimizer, lrs in zip(self.optimizers, rates, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                size = sum(p.numel() for p in group["params"] if id(p) in names)
                total, count = total + lr * size, count + size
        if count:
            return total / count
        return next((lr for lrs in rates for lr in lrs if lr > 0), 0.0)  # of adapters, whose factors are not followed

    def idle(self, moments: Mapping[str, Moments], steps: Mapping[str, int]) -> frozenset[str]:
        """Leaves that the optimizer passed over in its last step, for want of a gradient.

        Args:
            moments: after the step.
            steps: step counts of the leaves before it.

        Raises:
            StateError: if that cannot be told, since gradients have been cleared.
        """
        gradients = self.gradients()
        counted = {name for name, m in moments.items() if m.kind == "adam"}
        if len(counted) < len(moments) and not gradients:
            raise StateError(
                "observe(): no gradient is left to tell which weights SGD moved; call observe() before zero_grad()"
            )
        return frozenset(
            name
            for name, m in moments.items()
            if (m.step == steps.get(name) if name in counted else name not in gradients)
        )

    def _names(self) -> dict[int, str]:
        """Leaves by the identity of every tensor that stands for them."""
        return {id(t): name for tensors in (self.tracked, self.masters) for name, t in tensors.items()}

    def require_complete(self) -> None:
        """Raises `StateError` if the optimizers own a parameter that is not followed."""
        known = set(self._names())
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
    weights = _product_weights(parameters, adapters)
    owned = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    tracked: dict[str, Tensor] = {}
    full: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, parameter in parameters.items():
        if not parameter.is_floating_point() or name in factors:
            continue
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            if first in tracked:
                aliases[name] = first
            continue
        master = find_master(name, parameter, optimizers, masters)
        if (id(parameter) in owned or id(master) in owned) and (parameter.requires_grad or master.requires_grad):
            tracked[name], full[name] = parameter, master
    if not tracked and not adapters:
        raise ConfigError("optimizer: owns none of the named parameters; pass those that it updates")
    warn_of_half_precision(full)
    replicas, reduce = layout(full)
    both = sorted(weights.keys() & tracked.keys())
    if both:
        raise ConfigError(
            f"lora_products: {both[0]!r} is trained itself beside its adapter; freeze it, or forecast the factors"
        )
    return Followed(
        tracked=weights | tracked,
        aliases=aliases,
        given=masters,
        optimizers=optimizers,
        replicas=replicas,
        reduce=reduce,
        adapters=tuple(adapters),
        parameters=parameters,
    )


def _product_weights(parameters: Mapping[str, Tensor], adapters: Sequence[Adapter]) -> dict[str, Tensor]:
    """The weights that adapters add to, which the parameters must name as the adapters do."""
    for adapter in adapters:
        missing = [name for name in (adapter.weight, adapter.a, adapter.b) if name not in parameters]
        if missing:
            raise ConfigError(
                f"lora_products: no parameter is named {missing[0]!r}; pass named_parameters() of the very model that "
                "lora_products names"
            )
    return {adapter.weight: parameters[adapter.weight] for adapter in adapters}


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
    require_reach(horizon, config.max_horizon)
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
