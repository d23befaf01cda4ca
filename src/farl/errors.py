"""Every exception FARL raises on purpose.

Catch `FarlError` to catch them all. A message always says what was wrong, the value seen, what is
allowed and what to do.

    FarlError
    |-- ConfigError (ValueError)   a setting or argument that cannot work; raised before work starts
    |-- StateError (RuntimeError)  a call out of order: a version repeated, a state of another model
    |-- ShapeError (ValueError)    a tensor whose shape or dtype does not fit its neighbours
    |-- WireError (RuntimeError)   weights or messages that arrived incomplete, corrupt or not at all
    |-- TaskError (RuntimeError)   a task, reward function or prompt that cannot be used
    |-- WorkerError (RuntimeError) rollout workers that keep dying
    |-- ConformanceError (AssertionError) a corrector that breaks a law of `farl.testing`
    `-- CheckpointError (RuntimeError)  a checkpoint that is missing, damaged or of another run
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FarlError(Exception):
    """Root of every exception FARL raises on purpose."""


class ConfigError(FarlError, ValueError):
    """A setting or argument that cannot work."""


class StateError(FarlError, RuntimeError):
    """A call that is out of order for the state it was made on."""


class ShapeError(FarlError, ValueError):
    """A tensor whose shape or dtype does not fit its neighbours."""


class WireError(FarlError, RuntimeError):
    """Weights or messages that arrived incomplete, corrupt or not at all."""


class TaskError(FarlError, RuntimeError):
    """A task, reward function or prompt that cannot be used."""


class WorkerError(FarlError, RuntimeError):
    """Rollout workers that keep dying or hanging."""


class ConformanceError(FarlError, AssertionError):
    """A corrector that breaks a law every corrector must obey."""


class CheckpointError(FarlError, RuntimeError):
    """A checkpoint that is missing, damaged or belongs to another run."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """Builds the error for a name that is not in a table: lists the known ones and the nearest.

    Args:
        kind: what the table holds, for the message ("rule", "corrector", ...).
        name: the name that was asked for.
        known: the names of the table.

    Returns:
        The exception; the caller raises it.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{kind}={name!r}: no such {kind}; known: {', '.join(names)}.{hint}")
