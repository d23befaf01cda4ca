"""The main loop of a rollout worker process: weights in, groups out, a heartbeat all the while.

What to build (engine, task) is passed in by the entry point `farl.worker`; who starts and watches this
process is `launch_local`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from farl.errors import FarlError
from farl.runtime.messages import Channel
from farl.runtime.rollout import Receiver, RolloutTools, work_off
from farl.runtime.schedule import Dispatch

log = logging.getLogger("farl.worker")
HEARTBEAT_S = 0.5


class Pulse:
    """Sends a sign of life from a thread of its own; ends the process when the learner is gone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ticks = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farl-pulse", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Notes progress; called after every decoding step."""
        self._ticks += 1

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            try:
                self._channel.send({"type": "alive", "ticks": self._ticks})
            except (FarlError, OSError):
                os._exit(1)


def serve(channel: Channel, build: Callable[[Mapping[str, Any]], RolloutTools], receiver: Receiver) -> None:
    """Works off dispatches until told to stop or until the learner is gone.

    The first message carries the run's config. Weights are loaded once per publication; a dispatch is
    answered by its groups or by the error that made it impossible.

    Args:
        channel: to the learner.
        build: makes the tools from the config.
        receiver: opens published weights.
    """
    pulse = Pulse(channel)
    first = channel.recv(None)
    if first is None or first["type"] == "stop":
        return
    try:
        tools = build(first["config"])
        channel.send({"type": "ready", "pid": os.getpid()})
        while (message := channel.recv(None)) is not None and message["type"] == "dispatch":
            dispatch = Dispatch.from_json(message["dispatch"])
            done = work_off(dispatch, message["descriptor"], receiver, tools, pulse.tick)
            channel.send({"type": "done", **done.to_json()})
    except FarlError as error:
        log.exception("worker stops")
        channel.send({"type": "failed", "kind": type(error).__name__, "error": str(error)})
    finally:
        pulse.stop()
