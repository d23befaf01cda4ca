"""Rollout workers as processes of this machine: started, watched, replaced, and their work re-sent.

A worker that exits, falls silent or makes no progress is killed and replaced; the dispatch it held goes to
its successor. Only whole dispatches are accepted, from the process that was given them, so no group is lost
and none arrives twice. A thread feeds and watches them, so that they never wait for a learner that computes.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from farl import errors
from farl.errors import FarlError, WorkerError
from farl.runtime.config import AsyncConfig
from farl.runtime.messages import Channel
from farl.runtime.rollout import Generated
from farl.runtime.schedule import Dispatch

log = logging.getLogger("farl.launch")
_POLL_S = 0.2
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Work:
    """A dispatch and the descriptor of its weights."""

    dispatch: Dispatch
    descriptor: Mapping[str, Any]


@dataclass
class Worker:
    """One worker process as the learner sees it; times are on the monotonic clock."""

    index: int
    process: subprocess.Popen[bytes]
    channel: Channel
    log_file: IO[bytes]
    started_s: float
    seen_s: float
    progress_s: float
    ready: bool = False
    ticks: int = -1
    work: Work | None = field(default=None)


class LocalPool:
    """Keeps `num_workers` processes busy.

    Args:
        command: starts a worker; `--fd N` is appended.
        config: JSON config sent to each worker first.
        pipeline: number of workers, time-outs, most restarts.
        log_folder: each worker's stderr goes to `worker_<i>.log` there.
    """

    def __init__(
        self, command: Sequence[str], config: Mapping[str, Any], pipeline: AsyncConfig, log_folder: Path
    ) -> None:
        self._command = list(command)
        self._config = dict(config)
        self._pipeline = pipeline
        self._log_folder = log_folder
        self._queue: deque[Work] = deque()
        self._num_restarts = 0
        self._closed = threading.Event()
        self._done: queue.SimpleQueue[Generated] = queue.SimpleQueue()
        self._error: FarlError | None = None
        self._sleep_fd, self._wake_fd = os.pipe()
        log_folder.mkdir(parents=True, exist_ok=True)
        self._workers = [self._start(i) for i in range(pipeline.num_workers)]
        self._thread = threading.Thread(target=self._run, name="farl-launch", daemon=True)
        self._thread.start()

    @property
    def num_restarts(self) -> int:
        """Workers replaced so far."""
        return self._num_restarts

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by index."""
        return [w.process.pid for w in self._workers]

    def submit(self, dispatch: Dispatch, descriptor: Mapping[str, Any]) -> None:
        """Queues a dispatch; an idle worker gets it at once."""
        self._queue.append(Work(dispatch, descriptor))
        os.write(self._wake_fd, b"w")

    def collect(self, timeout_s: float) -> list[Generated]:
        """Finished dispatches, waiting up to `timeout_s` for the first."""
        done: list[Generated] = []
        try:
            done.append(self._done.get(timeout=timeout_s))
            while True:
                done.append(self._done.get_nowait())
        except queue.Empty:
            if not done and self._error is not None:
                raise self._error from None
            return done

    def close(self) -> None:
        """Stops the workers: asks first, kills those that have not gone after two seconds."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.write(self._wake_fd, b"c")
        self._thread.join()
        for worker in self._workers:
            _tell(worker, {"type": "stop"})
            worker.channel.close()
        deadline = time.monotonic() + 2.0
        for worker in self._workers:
            try:
                worker.process.wait(timeout=max(0.05, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.log_file.close()
        os.close(self._wake_fd)
        os.close(self._sleep_fd)

    def _run(self) -> None:
        """Feeds and watches the workers, also while the learner computes."""
        try:
            while not self._closed.is_set():
                self._turn()
        except FarlError as error:
            self._error = error
        except Exception as error:  # the thread's boundary: the learner must hear of it
            self._error = WorkerError(f"the launcher failed: {type(error).__name__}: {error}")
            self._error.__cause__ = error

    def _turn(self) -> None:
        channels = {w.channel.fileno(): w for w in self._workers}
        for fd in wait([*channels, self._sleep_fd], timeout=_POLL_S):
            assert isinstance(fd, int)
            if fd == self._sleep_fd:
                os.read(fd, 4096)
            else:
                self._read(channels[fd])
        self._watch()
        self._hand_out()

    def _start(self, index: int) -> Worker:
        channel, child_fd = Channel.pair()
        log_file = (self._log_folder / f"worker_{index}.log").open("ab")
        try:
            process = subprocess.Popen(
                [*self._command, "--fd", str(child_fd)],
                pass_fds=[child_fd],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        finally:
            os.close(child_fd)
        now = time.monotonic()
        worker = Worker(index, process, channel, log_file, started_s=now, seen_s=now, progress_s=now)
        _tell(worker, {"type": "config", "config": self._config})
        return worker

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not self._queue:
                return
            if worker.ready and worker.work is None:
                work = self._queue.popleft()
                worker.work = work
                worker.progress_s = time.monotonic()
                message = {
                    "type": "dispatch",
                    "dispatch": work.dispatch.to_json(),
                    "descriptor": dict(work.descriptor),
                }
                _tell(worker, message)

    def _read(self, worker: Worker) -> None:
        try:
            while (message := worker.channel.recv(0.0)) is not None:
                worker.seen_s = time.monotonic()
                self._handle(worker, message)
        except EOFError:
            self._replace(worker, f"exited with status {worker.process.wait()}")

    def _handle(self, worker: Worker, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            worker.ready = True
        elif kind == "alive" and message["ticks"] != worker.ticks:
            worker.ticks = message["ticks"]
            worker.progress_s = worker.seen_s
        elif kind == "failed":
            error_type: type[FarlError] = getattr(errors, message["kind"], WorkerError)
            raise error_type(f"worker {worker.index}: {message['error']}")
        elif kind == "done":
            if worker.work is None or worker.work.dispatch.dispatch_id != message["dispatch_id"]:
                raise WorkerError(
                    f"worker {worker.index} answered dispatch {message['dispatch_id']}, which it was not given"
                )
            worker.work = None
            self._done.put(Generated.from_json(message))

    def _watch(self) -> None:
        now = time.monotonic()
        limits = self._pipeline
        for worker in list(self._workers):
            status = worker.process.poll()
            if status is not None:
                self._replace(worker, f"exited with status {status}")
            elif worker.ready and now - worker.seen_s > limits.heartbeat_timeout_s:
                self._replace(worker, f"was silent for {now - worker.seen_s:.1f} s")
            elif not worker.ready and now - worker.started_s > limits.startup_timeout_s:
                self._replace(worker, f"was not ready after {limits.startup_timeout_s:.0f} s")
            elif worker.work is not None and now - worker.progress_s > limits.progress_timeout_s:
                self._replace(worker, f"made no progress for {limits.progress_timeout_s:.0f} s")

    def _replace(self, worker: Worker, why: str) -> None:
        worker.process.kill()
        worker.process.wait()
        worker.channel.close()
        worker.log_file.close()
        self._num_restarts += 1
        if self._num_restarts > self._pipeline.max_restarts:
            raise WorkerError(
                f"worker {worker.index} {why}; {self._num_restarts - 1} restarts were allowed "
                f"(pipeline.max_restarts). Its last words:\n{self._last_words(worker)}"
            )
        log.warning("worker %d (pid %d) %s; restarting it", worker.index, worker.process.pid, why)
        if worker.work is not None:
            self._queue.appendleft(worker.work)
        self._workers[self._workers.index(worker)] = self._start(worker.index)

    def _last_words(self, worker: Worker) -> str:
        path = self._log_folder / f"worker_{worker.index}.log"
        return path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")


def _tell(worker: Worker, message: Mapping[str, Any]) -> None:
    """Sends to a worker; one that is gone is noticed by `_watch`."""
    try:
        worker.channel.send(dict(message))
    except (FarlError, OSError):
        log.debug("worker %d did not take %s", worker.index, message["type"])
