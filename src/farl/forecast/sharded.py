"""Weights spread over ranks: local shards, how often a leaf is held, and the one small all-reduce.

`torch.distributed.tensor` is touched here alone. Every rank forecasts its own shards; only inner products, a few dozen
float64, are added over ranks, so observing never gathers a weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from farl.errors import ConfigError
from farl.forecast.sample import Reduce


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(shard: Tensor, whole: Tensor) -> Tensor:
    """A shard with the layout of `whole`: a DTensor where that is one."""
    if not isinstance(whole, DTensor):
        return shard.view(whole.shape)
    return DTensor.from_local(
        shard.view(whole.to_local().shape),
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def full(tensor: Tensor) -> Tensor:
    """The whole tensor; a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, or their shards, begin at the same address."""
    return local(a).data_ptr() == local(b).data_ptr()


def num_shards(name: str, tensor: Tensor) -> int:
    """Distinct pieces a leaf is cut into.

    Raises:
        ConfigError: for a placement that is neither sharded nor replicated.
    """
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard) and "Shard" not in type(placement).__name__:
            raise ConfigError(f"leaf {name!r}: placement {placement}; only sharded or replicated weights are followed")
        count *= size
    return count


def layout(leaves: Mapping[str, Tensor]) -> tuple[dict[str, int], Reduce | None]:
    """How many ranks hold the same copy of each leaf, and what adds a tensor over all ranks that hold any.

    Args:
        leaves: parameters, DTensors or not.

    Returns:
        Replicas by name, and the reduction; empty and None where no leaf is a DTensor.
    """
    meshes = [t.device_mesh for t in leaves.values() if isinstance(t, DTensor)]
    if not meshes:
        return {}, None
    largest = max(meshes, key=lambda mesh: mesh.size())
    world = math.prod(largest.shape)
    replicas = {name: world // num_shards(name, t) for name, t in leaves.items()}
    groups = [largest.get_group(dim) for dim in range(largest.ndim)]

    def reduce(tensor: Tensor) -> Tensor:
        total = tensor.to(largest.device_type, copy=True)
        for group in groups:
            dist.all_reduce(total, group=group)
        return total.to(tensor.device)

    return {name: n for name, n in replicas.items() if n != 1}, reduce


def reshard(module: nn.Module | None) -> None:
    """Lets go of whole weights that FSDP2 keeps after a forward pass, so that the next one reads the shards anew."""
    if module is None:
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def exchange(parameter: Tensor, weight: Tensor) -> Tensor:
    """Puts another weight into a parameter and returns what it held, to be put back the same way.

    Plain parameters exchange storage, so the old one is untouched to the bit; a shard that a wrapper such as FSDP2
    holds on to by address is copied over and kept as a copy.
    """
    if not isinstance(parameter, DTensor):
        kept = parameter.data
        parameter.data = weight.to(kept.dtype)
        return kept
    shard = parameter.to_local().detach()
    kept = shard.clone()
    shard.copy_(local(weight))
    return like(kept, parameter)
