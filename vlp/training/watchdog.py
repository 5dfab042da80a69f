"""Watchdog: names silent or blocking ranks, and writes the ranks' stacks."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlp import distributed
from vlp.io import write_text
from vlp.training.run_folder import this_host

# Phases that may take any time, and the multiple of a phase's longest time from which it stands.
_PATIENT = "start", "save", "validate", "end"
_UNUSUAL = 3.0


class Sign(NamedTuple):
    """One sign of life of one rank.

    number: of the sign; host: machine; step: optimiser steps done; moves: phases entered, equal on
    all ranks at the same place; phase: the current one, for `seconds`; stands: too long in it;
    waits: in a collective call.
    """

    number: int
    host: str
    step: int
    moves: int
    phase: str
    seconds: float
    stands: bool
    waits: bool


class HangDetector:
    """Comparison of ranks' signs; a rank without a new one for `patience` seconds is silent."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._last_signs: dict[int, tuple[int, float]] = {}
        self._silent: dict[int, float] = {}
        self._stands: int | None = None

    def update(self, signs: Sequence[Sign], now: float) -> tuple[list[str], bool]:
        """Return messages at `now` (seconds), and whether they are the first of a hang.

        `signs` are the last ones of ranks from 0, empty until all have begun.
        """
        messages, hangs = [], False
        for rank, sign in enumerate(signs):
            number, since = self._last_signs.get(rank, (None, now))
            if number != sign.number:
                self._last_signs[rank] = sign.number, now
                if rank in self._silent:
                    silence = now - self._silent.pop(rank)
                    messages.append(f"rank {rank} ({sign.host}) is back after {silence:.0f} s")
            elif now - since > self._patience and sign.phase != "end" and rank not in self._silent:
                self._silent[rank], hangs = since, True
                messages.append(
                    f"rank {rank} ({sign.host}) is silent for {now - since:.0f} s; it was in step "
                    f"{sign.step + 1}, {sign.phase}"
                )
        last = min(signs, key=lambda sign: sign.moves, default=None)
        stands = last is not None and last.moves != self._stands and all(s.stands for s in signs)
        if self._silent or last is None or not stands:
            return messages, hangs
        self._stands = last.moves
        # The others wait for those that are behind, or of these for one in no collective call.
        last_ranks = {rank: sign for rank, sign in enumerate(signs) if sign.moves == last.moves}
        blocking = {rank: sign for rank, sign in last_ranks.items() if not sign.waits} or last_ranks
        names = ", ".join(f"{rank} ({sign.host})" for rank, sign in blocking.items())
        others = "; the others wait" if len(blocking) < len(signs) else ""
        message = f"step {last.step + 1} stands for {last.seconds:.0f} s: rank {names}"
        return [*messages, f"{message} in {last.phase}{others}"], True


class Watchdog:
    """Thread that sends a rank's signs of life; on rank 0 it also watches all, rank 1 watches rank
    0.

    On a hang every rank that can writes the stacks of its threads and its last collective calls to
    `hang/step_N` in `folder`, through rank 0.

    Args:
        patience: seconds without a sign or a move after which a rank is named; None disables it.
        say: receives the messages.
    """

    def __init__(self, patience: float | None, say: Callable[[str], None], folder: Path) -> None:
        self.step = 0
        self._patience, self._folder, self._hang_folder = patience, folder, folder
        self._rank, self._ranks = distributed.rank(), distributed.world_size()
        self._say = say if self._rank == 0 else lambda text: print(text, file=sys.stderr)
        self._phase, self._moves, self._entered = "start", 0, time.perf_counter()
        self._longest: dict[str, float] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._requests, self._missing = 0, set[int]()  # hangs so far, and ranks without stacks yet

    def enter(self, phase: str) -> None:
        """Note that this rank goes over to a phase, such as data, forward, update or save."""
        now = time.perf_counter()
        spent = now - self._entered
        self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), spent)
        self._phase, self._entered, self._moves = phase, now, self._moves + 1

    def __enter__(self) -> Watchdog:
        if self._patience is not None:
            # Signs go through the process group's store, also during collective calls.
            arguments = distributed.clone_store(), self._patience
            self._thread = threading.Thread(
                target=self._run, args=arguments, name="watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._phase = "end"
        self._over.set()
        if self._thread is not None:
            # The store may be gone.
            self._thread.join(timeout=1.0)

    def _run(self, store: Any, patience: float) -> None:
        detector, number, is_over = HangDetector(patience), 0, False
        while not is_over:
            is_over, number = self._over.is_set(), number + 1
            try:
                signs = self._exchange(store, number, patience)
                messages, hangs = detector.update(signs, time.monotonic())
                for message in messages:
                    self._say(message)
                if self._rank == 0:
                    self._collect(store, hangs)
            except RuntimeError:  # the store is gone, and so is rank 0 or its launcher
                return
            self._over.wait(patience / 6)

    def _exchange(self, store: Any, number: int, patience: float) -> list[Sign]:
        """Send a sign, with stacks on request; return signs of the watched ranks."""
        seconds, longest = time.perf_counter() - self._entered, self._longest.get(self._phase, 0.0)
        stands = self._phase not in _PATIENT and seconds > max(patience, _UNUSUAL * longest)
        state = self.step, self._moves, self._phase, seconds, stands, distributed.in_collective()
        sign = Sign(number, this_host(), *state)
        if store is None:
            return [sign]
        # A stopped store never answers, and calls to it have no timeout.
        silence = f"the store of the ranks, at rank 0 or its launcher, is silent for {patience:g} s"
        alarm = threading.Timer(patience, self._say, [silence])
        if self._rank == 1:
            alarm.start()
        try:
            store.set(f"sign/{self._rank}", json.dumps(sign))
            if self._rank > 0 and store.check([f"asked/{self._requests + 1}"]):
                self._requests += 1
                store.set(f"stacks/{self._requests}/{self._rank}", stacks())
            watched = {0: self._ranks, 1: 1}.get(self._rank, 0)
            keys = [f"sign/{rank}" for rank in range(watched)]
            if not keys or not store.check(keys):  # not all have begun
                return []
            return [Sign(*json.loads(text)) for text in store.multi_get(keys)]
        finally:
            alarm.cancel()

    def _collect(self, store: Any, hangs: bool) -> None:
        """Request stacks of all ranks if a step hangs, and write those that have arrived."""
        if hangs:
            self._requests, self._missing = self._requests + 1, set(range(1, self._ranks))
            self._hang_folder = self._folder / f"step_{self.step}"
            self._hang_folder.mkdir(parents=True, exist_ok=True)
            write_text(self._hang_folder / "rank_0.txt", stacks())
            if store is not None:
                store.set(f"asked/{self._requests}", "")
            self._say(f"stacks and last collective calls of each rank: {self._hang_folder}")
        for rank in sorted(self._missing):
            if store.check([key := f"stacks/{self._requests}/{rank}"]):
                write_text(self._hang_folder / f"rank_{rank}.txt", store.get(key).decode())
                self._missing.remove(rank)


def stacks() -> str:
    """Return the stacks of this process's threads, and its last collective calls."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    ]
    if distributed.is_distributed():
        parts.append("last collective calls\n" + "\n".join(distributed.last_calls(32)))
    return "\n".join(parts) + "\n"
