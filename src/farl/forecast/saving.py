"""A forecaster's state as tensors and plain JSON types, and back."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from farl.errors import StateError
from farl.forecast.config import ForecastConfig
from farl.forecast.gate import PolicyEvidence
from farl.forecast.gram import GramBand
from farl.forecast.plan import ForecastPlan
from farl.forecast.state import ForecastState

_SAMPLE, _CURVATURE, _PROMISED = "sample_rows", "curvature", "promised"
_FINGERPRINTED = 256
"""About how many entries of each leaf a fingerprint reads."""


def to_dict(
    state: ForecastState, *, num_holds: Mapping[str, int], leaves: Iterable[tuple[str, Tensor]]
) -> dict[str, Any]:
    """`{"tensors": {name: tensor}, "record": JSON types}`; the tensors are copies."""
    tensors = {
        f"ring/{name}/{part}": t.clone() for name, ring in state.rings.items() for part, t in ring.tensors.items()
    }
    tensors[_SAMPLE] = state.sample_rows_RS.clone()
    if state.curvature_S is not None:
        tensors[_CURVATURE] = state.curvature_S.clone()
    promised = list(state.promised.items())
    tensors |= {f"{_PROMISED}/{i}": moved.clone() for i, (_, moved) in enumerate(promised)}
    record = {
        "version": state.version,
        "first": state.first,
        "grams": {key: band.to_json() for key, band in state.grams.items()},
        "lrs": _keyed(state.lrs),
        "momentum": state.momentum,
        "num_steps": state.num_steps,
        "tells_displacement": state.tells_displacement,
        "config": _defining(state.config),
        "pending": [p.to_json() for p in state.pending],
        "promised": [list(key) for key, _ in promised],
        "incumbents": _keyed(state.incumbents),
        "realised": _keyed({h: list(x) for h, x in state.realised.items()}),
        "would_be": _keyed({h: list(x) for h, x in state.would_be.items()}),
        "evidence": _keyed({h: e.to_json() for h, e in state.evidence.items()}),
        "num_nonfinite": state.num_nonfinite,
        "num_holds": dict(num_holds),
        "fingerprint": fingerprint(leaves),
    }
    return {"tensors": tensors, "record": record}


def from_dict(saved: Mapping[str, Any], fresh: ForecastState, *, leaves: Iterable[tuple[str, Tensor]]) -> ForecastState:
    """Inverse of `to_dict`, over a state that `init` has just made from the same weights.

    Raises:
        StateError: if leaves, shapes or the weights do not fit the saved state.
    """
    version_of(saved)
    record, tensors = saved["record"], saved["tensors"]
    for name, own in _defining(fresh.config).items():
        if record["config"][name] != own:
            raise StateError(
                f"{name}={own!r}: the state was saved with {name}={record['config'][name]!r}; resume with the config "
                "it was saved with"
            )
    expected = {f"ring/{n}/{part}": t for n, ring in fresh.rings.items() for part, t in ring.tensors.items()}
    expected[_SAMPLE] = fresh.sample_rows_RS
    for key, own in expected.items():
        if key not in tensors or tensors[key].shape != own.shape or tensors[key].dtype != own.dtype:
            raise StateError(
                f"{key}: the saved state is of another model; load it with the model and parameters it was saved with"
            )
    if record["fingerprint"] != fingerprint(leaves):
        raise StateError("weights differ from those the state was saved with; load the model first, then this")
    for key, own in expected.items():
        own.copy_(tensors[key])
    device = fresh.sample_rows_RS.device
    curvature = tensors.get(_CURVATURE)
    return replace(
        fresh,
        first=record["first"],
        grams={key: GramBand.from_json(band) for key, band in record["grams"].items()},
        curvature_S=None if curvature is None else curvature.to(device, copy=True),
        lrs={int(v): lr for v, lr in record["lrs"]},
        momentum=record["momentum"],
        num_steps=record["num_steps"],
        tells_displacement=record["tells_displacement"],
        pending=tuple(ForecastPlan.from_json(p) for p in record["pending"]),
        promised={
            (int(base), h): tensors[f"{_PROMISED}/{i}"].to(device, copy=True)
            for i, (base, h) in enumerate(record["promised"])
        },
        incumbents=dict(record["incumbents"]),
        realised={h: (x[0], x[1]) for h, x in record["realised"]},
        would_be={h: (x[0], x[1]) for h, x in record["would_be"]},
        evidence={h: PolicyEvidence(**e) for h, e in record["evidence"]},
        num_nonfinite=record["num_nonfinite"],
    )


def _keyed(table: Mapping[Any, Any]) -> list[list[Any]]:
    """A mapping with numbers for keys as JSON pairs."""
    return [[key, value] for key, value in table.items()]


def version_of(saved: Mapping[str, Any]) -> int:
    """The version of a saved state.

    Raises:
        StateError: if it is none.
    """
    record = saved.get("record")
    if not isinstance(record, Mapping) or "tensors" not in saved or not isinstance(record.get("version"), int):
        raise StateError("saved: no forecaster's state; give what state_dict() returned")
    return int(record["version"])


def _defining(config: ForecastConfig) -> dict[str, Any]:
    """The settings that give tensors and inner products their shape and meaning."""
    names = ("source", "lags", "max_horizon", "history_dtype", "sample_entries", "metric", "sharp_fraction", "grouping")
    return {name: getattr(config, name) for name in names} | {"closed_form": config.rule == "moments"}


def fingerprint(leaves: Iterable[tuple[str, Tensor]]) -> int:
    """A checksum of names, sizes and some entries of every leaf, the same on any machine and number of threads."""
    checksum = 0
    for name, leaf in leaves:
        flat_N = leaf.detach().reshape(-1)
        some = flat_N[:: max(1, flat_N.numel() // _FINGERPRINTED)].float().cpu()
        checksum = zlib.crc32(f"{name} {flat_N.numel()}".encode(), checksum)
        checksum = zlib.crc32(bytes(some.contiguous().view(torch.uint8).tolist()), checksum)
    return checksum
