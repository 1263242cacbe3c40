"""Decides which sequences run when; owns the one thread that runs the network.

`eager` lets a sequence join between any two steps. `lockstep` starts a batch only when every live stream has asked, takes
them in an order that does not depend on who came first, and lets nobody join before it is done: the same requests then give the
same bits.
"""

from __future__ import annotations

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
        self._expected: set[str] = set()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._errands: list[Callable[[], None]] = []
        self._is_full = False
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="turnwise-engine", daemon=True)
        self._thread.start()

    # Called from other threads.

    def submit(self, sequence: Sequence) -> None:
        self._inbox.put(lambda: self._take(sequence))

    def cancel(self, sequence: Sequence) -> None:
        self._inbox.put(lambda: self._drop(sequence))

    def release(self, stream_id: str) -> None:
        self._inbox.put(lambda: self._forget(stream_id))

    def expect(self, stream_ids: Iterable[str]) -> None:
        names = tuple(stream_ids)
        self._inbox.put(lambda: self._expected.update(names))

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
            if not self._running and not self._errands and not self._may_start():
                self._inbox.get(timeout=_POLL_S if self._waiting else None)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            self._is_full = False

    def _may_start(self) -> bool:
        return bool(self._waiting) and not self._is_full and not self._missing()

    def _missing(self) -> list[str]:
        """The streams that a lockstep batch waits for."""
        return [*sorted(self._expected), *self._residents.silent()] if self._is_lockstep else []

    def _take(self, sequence: Sequence) -> None:
        try:
            self._residents.join(sequence)
        except PolicyError as error:
            sequence.resolve(error)
            return
        self._expected.discard(sequence.request.stream_id)
        self._waiting.append(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._residents.leave(sequence)
        for queue_ in (self._waiting, self._running):
            if sequence in queue_:
                queue_.remove(sequence)

    def _forget(self, stream_id: str) -> None:
        self._expected.discard(stream_id)
        self._residents.release(stream_id)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for sequence in [s for s in (*self._waiting, *self._running) if s.deadline <= now]:
            sequence.resolve(PolicyError(self._explain_lateness(sequence)))
            self._drop(sequence)

    def _explain_lateness(self, sequence: Sequence) -> str:
        request, start = sequence.request, f"stream {sequence.request.stream_id}"
        if sequence in self._running:
            return (
                f"{start} had {len(sequence.ids)} of at most {request.sampling.max_new_tokens} tokens when its deadline of "
                f"{request.deadline_s:g} s passed; raise the deadline or lower max_new_tokens"
            )
        missing = self._missing()
        if missing:
            names = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
            return (
                f"{start} waited {request.deadline_s:g} s for {len(missing)} other streams of its lockstep batch ({names}); "
                "they must ask for a completion or be released"
            )
        return f"{start} waited {request.deadline_s:g} s for cache memory; raise kv_budget_mb or run fewer episodes at once"

    def _admit(self) -> list[Sequence]:
        """The waiting sequences that may start now, each with a slot."""
        if not self._waiting or self._missing():
            return []
        # Streams that hold a slot go first: they end sooner, and then their memory is free.
        line = sorted(self._waiting, key=lambda s: (not self._residents.has_slot(s), s.order))
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
        self._is_full = not admitted
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
