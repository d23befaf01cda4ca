"""A whole model from its followed leaves: every parameter in its order, frozen, tied and merged ones too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farl.errors import StateError
from farl.forecast.follow import Followed
from farl.forecast.sharded import full, like, local, shares_storage


@dataclass(frozen=True)
class WholeModel:
    """What a stream of flat leaves makes of a model.

    Attributes:
        parameters: all of the model, by name.
        followed: which of them are leaves, and what the others are to those.
    """

    parameters: Mapping[str, nn.Parameter]
    followed: Followed

    @property
    def written(self) -> frozenset[str]:
        """Parameters whose leaf is what is sent: not the weights that followed products are added to."""
        return frozenset(self.followed.tracked) - {adapter.weight for adapter in self.followed.adapters}

    def require_targets(self, into: Mapping[str, Tensor], *, gather: bool) -> Mapping[str, Tensor]:
        """Tensors to write weights to, if all of them fit.

        Raises:
            StateError: for one that does not, or any of them together with `gather`.
        """
        if into and gather:
            raise StateError("into: given with gather=True; gather makes whole tensors of its own, so give one of them")
        masters = self.followed.masters if into else {}
        for name, target in into.items():
            if name not in self.parameters or name in self.followed.factors:
                raise StateError(f"into[{name!r}]: no such weight is streamed; give names that `weights` yields")
            shard = local(masters.get(name, self.parameters[name]).detach())
            if target.shape != shard.shape or target.device != shard.device or not target.is_contiguous():
                raise StateError(
                    f"into[{name!r}]: {tuple(target.shape)} on {target.device}, contiguous: {target.is_contiguous()}; "
                    f"give a contiguous tensor of {tuple(shard.shape)} on {shard.device}"
                )
            if target.numel() and shares_storage(target, shard):
                raise StateError(f"into[{name!r}]: is the learner's own weight; give a tensor of its own")
        return into

    def parameters_of(
        self,
        leaves: Iterator[tuple[str, Tensor]],
        dtype: torch.dtype | None,
        *,
        gather: bool = False,
        targets: Mapping[str, Tensor] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in its order: from its leaf, or as it is; merged weights in place of adapters.

        Args:
            leaves: name and flat weight of every followed leaf, in their order.
            dtype: of those that have no leaf; None keeps their own.
            gather: whole tensors instead of DTensor shards; a collective.
            targets: tensors from `require_targets` that weights are to lie in.
        """
        forecast = self._by_parameter(leaves)
        factors, aliases = self.followed.factors, self.followed.aliases
        tied: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if name in factors:
                continue
            if name in self.followed.tracked:
                key, weight = next(forecast)
                assert key == name
                if name in aliases.values():
                    tied[name] = weight
            elif name in aliases:
                weight = tied[aliases[name]]
            else:
                kept = parameter.dtype if not parameter.is_floating_point() else dtype or parameter.dtype
                weight = parameter.detach().to(kept)
            if targets and name in targets and not shares_storage(targets[name], weight):
                weight = like(targets[name].copy_(local(weight)), parameter)
            yield name, full(weight) if gather else weight

    def beside_adapters(
        self, leaves: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The same, less what followed adapters add by themselves: what to put beside active ones."""
        added = self.followed.products()
        for name, weight in self.parameters_of(leaves, dtype):
            yield name, weight - added[name] if name in added else weight

    def _by_parameter(self, leaves: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Flat leaves in the shape of their parameters; products added to the weights they belong to."""
        if not self.followed.adapters:
            for name, flat_N in leaves:
                yield name, like(flat_N, self.parameters[name])
            return
        held = dict(leaves)
        products = {adapter.weight for adapter in self.followed.adapters}
        for name, parameter in self.parameters.items():
            if name in products:
                weight = parameter.detach().float() + held[name].view(parameter.shape)
                yield name, weight.to(held[name].dtype)
            elif name in held:
                yield name, like(held[name], parameter)
