"""Checkpoints: whole or not at all, verified on load, nothing pickled.

checkpoints/step_00000012/manifest.json           size and SHA-256 of every other file
                          <group>.safetensors     model, optimizer, forecaster, publications, ...
                          records.json            everything that is not a tensor
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farl.errors import CheckpointError, FarlError
from farl.wire.folder import flush_to_disk, load_tensors, save_tensors

log = logging.getLogger("farl.checkpoint")

_MANIFEST, _RECORDS, _SUFFIX = "manifest.json", "records.json", ".safetensors"


class CheckpointStore:
    """A folder of checkpoints, newest kept.

    Args:
        folder: made when the first one is saved.
        keep: how many stay.
    """

    def __init__(self, folder: Path, *, keep: int = 1) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], records: Mapping[str, Any]) -> Path:
        """Writes a checkpoint beside the others and renames it into place; then drops the oldest.

        Args:
            step: its number; one of the same number is replaced.
            tensors: by group and name.
            records: JSON types.

        Returns:
            Its folder.

        Raises:
            CheckpointError: if it cannot be written; earlier checkpoints are intact.
        """
        final = self._folder / f"step_{step:08d}"
        partial = self._folder / f".{final.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for group, named in tensors.items():
                if named:
                    save_tensors(partial / (group + _SUFFIX), named)
            _write_text(partial / _RECORDS, json.dumps(records))
            manifest = {p.name: {"size": p.stat().st_size, "sha256": _digest(p)} for p in sorted(partial.iterdir())}
            _write_text(partial / _MANIFEST, json.dumps({"step": step, "files": manifest}, indent=1))
            flush_to_disk(partial)
            _move_into_place(partial, final)
            flush_to_disk(self._folder)
        except (OSError, FarlError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"{final}: checkpoint not written: {error}; earlier checkpoints are intact. Free some space, or point "
                "the run folder to another disk"
            ) from error
        for old in self._steps()[: -self._keep]:
            shutil.rmtree(self._path(old), ignore_errors=True)
        return final

    def latest(self) -> int | None:
        """Step of the newest checkpoint that verifies; damaged ones are skipped with a warning."""
        for step in reversed(self._steps()):
            try:
                self._verify(step)
            except CheckpointError as error:
                log.warning("%s; looking for an earlier one", error)
            else:
                return step
        return None

    def load(self, step: int) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Reads a checkpoint.

        Returns:
            Tensors by group and name, and the records.

        Raises:
            CheckpointError: if it is missing or damaged.
        """
        names = self._verify(step)
        path = self._path(step)
        tensors = {n.removesuffix(_SUFFIX): load_tensors(path / n) for n in names if n.endswith(_SUFFIX)}
        return tensors, json.loads((path / _RECORDS).read_text())

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return sorted(int(p.name.removeprefix("step_")) for p in self._folder.glob("step_" + "[0-9]" * 8))

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}"

    def _verify(self, step: int) -> list[str]:
        path = self._path(step)
        try:
            files = json.loads((path / _MANIFEST).read_text())["files"]
            for name, expected in files.items():
                if (path / name).stat().st_size != expected["size"] or _digest(path / name) != expected["sha256"]:
                    raise CheckpointError(f"{path / name}: damaged; it is not what was written")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged or incomplete: {error}") from error
        return list(files)


def _move_into_place(partial: Path, final: Path) -> None:
    """Renames; a checkpoint of the same number is moved away first and only then dropped."""
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(final)


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flatten_optimizer(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Splits an optimizer's state into tensors and JSON types.

    Args:
        state_dict: of any torch optimizer whose state is tensors and numbers by parameter.

    Returns:
        Tensors named `<parameter index>.<key>`, and a record; `restore_optimizer` inverts it exactly.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for index, entry in state_dict["state"].items():
        for key, value in entry.items():
            target: dict[str, Any] = tensors if torch.is_tensor(value) else scalars
            target[f"{index}.{key}"] = value
    return tensors, {"scalars": scalars, "param_groups": state_dict["param_groups"]}


def restore_optimizer(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `flatten_optimizer`."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**record["scalars"], **tensors}.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    groups = [{k: tuple(v) if k == "betas" else v for k, v in g.items()} for g in record["param_groups"]]
    return {"state": state, "param_groups": groups}
