"""Decides which sequences run when; owns the one thread that runs the network.

`eager` lets a sequence join between any two steps. `lockstep` takes whoever asked at the same moment of the caller's event loop, in an
order that does not depend on who came first, and lets nobody join before that batch is done: the same requests then give the
same bits.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from turnwise.errors import PolicyError
from turnwise.policies.residents import Residents
from turnwise.policies.runner import Runner
from turnwise.policies.sequences import Sequence

# How long the slot of a stream whose environment is busy is safe from requests that need its memory.
_IDLE_GRACE_S = 5.0
_POLL_S = 0.25


class Scheduler:
    """Takes requests from any thread and runs them on its own."""

    def __init__(self, runner: Runner, *, is_lockstep: bool, version: int) -> None:
        self.version = version
        self._runner = runner
        self._residents = Residents(runner.store, runner.image_token_id)
        self._is_lockstep = is_lockstep
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._errands: list[Callable[[], None]] = []
        self._is_stuck = False
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="turnwise-engine", daemon=True)
        self._thread.start()

    # Called from other threads.

    def post(self, commands: Iterable[Callable[[], None]]) -> None:
        """Run these on the engine's thread between two steps, with no step between them."""
        together = tuple(commands)

        def run() -> None:
            for command in together:
                command()

        self._inbox.put(run)

    def between_batches(self, function: Callable[[], Any]) -> Future[Any]:  # whatever the function returns
        """Run a function on the engine's thread once nothing is being sampled."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001  # goes to the caller
                future.set_exception(error)

        self._inbox.put(lambda: self._errands.append(call))
        return future

    def close(self, timeout_s: float = 30.0) -> None:
        def stop() -> None:
            self._is_open = False

        self._inbox.put(stop)
        self._thread.join(timeout_s)

    # Everything below runs on the engine's thread.

    def forget_caches(self) -> None:
        self._runner.forget()
        self._residents.forget(self._runner.store)

    def _run(self) -> None:
        while self._is_open:
            try:
                self._step()
            except Exception as error:  # noqa: BLE001  # every caller gets it
                self._fail_all(error)
        self._fail_all(PolicyError("the policy was closed while a completion was being sampled"))

    def _step(self) -> None:
        self._read_inbox()
        self._drop_expired()
        if not self._running:
            while self._errands:
                self._errands.pop(0)()
        # Who waits for the batch to end, to load weights for example, must not wait for ever.
        if not self._running or not (self._is_lockstep or self._errands):
            self._start(self._admit())
        if self._running:
            self._runner.decode(self._running)
            self._finish(self._running)

    def _read_inbox(self) -> None:
        """Do what was asked since the last step; with nothing to run, wait until something is asked."""
        try:
            if not self._running and not self._errands and (not self._waiting or self._is_stuck):
                self._inbox.get(timeout=_POLL_S if self._waiting else None)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            self._is_stuck = False

    def take(self, sequence: Sequence) -> None:
        try:
            self._residents.join(sequence)
        except PolicyError as error:
            sequence.resolve(error)
            return
        self._waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        self._residents.leave(sequence)
        for line in (self._waiting, self._running):
            if sequence in line:
                line.remove(sequence)

    def release(self, stream_id: str) -> None:
        sequence = self._residents.sequence_of(stream_id)
        if sequence is not None:
            sequence.resolve(
                PolicyError(f"stream {stream_id} was released while a completion was being sampled")
            )
            self.drop(sequence)
        self._residents.release(stream_id)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for sequence in [s for s in (*self._waiting, *self._running) if s.deadline <= now]:
            sequence.resolve(PolicyError(self._explain_lateness(sequence)))
            self.drop(sequence)

    def _explain_lateness(self, sequence: Sequence) -> str:
        request, start = sequence.request, f"stream {sequence.request.stream_id}"
        if sequence in self._running:
            return (
                f"{start} had {len(sequence.ids)} of at most {request.sampling.max_new_tokens} tokens when its deadline of "
                f"{request.deadline_s:g} s passed; raise the deadline or lower max_new_tokens"
            )
        if self._running or not self._is_stuck:
            return f"{start} waited {request.deadline_s:g} s for {len(self._running)} sequences to finish; raise the deadline"
        return f"{start} waited {request.deadline_s:g} s for cache memory; raise kv_budget_mb or run fewer episodes at once"

    def _ready(self) -> list[Sequence]:
        """Waiting sequences whose images are prepared. A lockstep batch waits for all of them."""
        ready = []
        for sequence in tuple(self._waiting):
            preparing = sequence.preparation
            if preparing is None:
                ready.append(sequence)
            elif self._is_lockstep or preparing.done():
                # Nothing else may start before it is known whether this one takes part.
                concurrent.futures.wait([preparing], timeout=max(0.0, sequence.deadline - time.monotonic()))
                error = preparing.exception() if preparing.done() else None
                if error is not None:
                    sequence.resolve(error)
                    self.drop(sequence)
                elif preparing.done():
                    ready.append(sequence)
        return ready

    def _admit(self) -> list[Sequence]:
        """The waiting sequences that may start now, each with a slot."""
        ready = self._ready()
        if not ready:
            self._is_stuck = True
            return []
        # Streams that hold a slot go first: they end sooner, and then their memory is free.
        line = sorted(ready, key=lambda s: (not self._residents.has_slot(s), s.order))
        admitted: list[Sequence] = []
        for sequence in line:
            if not self._residents.place(sequence):
                break
            admitted.append(sequence)
        if not admitted and not self._running:
            grace_s = 0.0 if self._is_lockstep else _IDLE_GRACE_S
            if self._residents.make_room(line[0], line[1:], idle_s=grace_s):
                admitted.append(line[0])
        self._residents.settle()
        self._is_stuck = not admitted
        self._waiting = [sequence for sequence in self._waiting if sequence.slot is None]
        return admitted

    def _start(self, admitted: list[Sequence]) -> None:
        if not admitted:
            return
        self._running.extend(admitted)
        self._running.sort(key=lambda sequence: sequence.slot_start)
        self._runner.prefill(admitted, self._residents)
        self._finish(admitted)

    def _finish(self, sequences: list[Sequence]) -> None:
        """Answer those that are done; they leave the batch at once."""
        done = [sequence for sequence in sequences if sequence.finish_reason is not None]
        for sequence in done:
            self._residents.leave(sequence)
            sequence.resolve(sequence.completion(self.version))
        if done:
            self._running = [sequence for sequence in self._running if sequence.finish_reason is None]

    def _fail_all(self, error: Exception) -> None:
        failed = error if isinstance(error, PolicyError) else PolicyError(f"the engine failed: {error!r}")
        failed.__cause__ = None if failed is error else error
        for sequence in (*self._running, *self._waiting):
            self._residents.leave(sequence)
            sequence.resolve(failed)
        self._running, self._waiting = [], []
