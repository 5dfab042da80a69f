"""Signs of life: every rank tells where it stands, and rank 0 names who lags or is silent.

They travel through the store by which the ranks found each other, in a thread, so that they come
while a rank waits in a collective call, and cost training nothing.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from vlp import distributed
from vlp.io import write_text
from vlp.training.logging.run_record import this_host
from vlp.training.logging.watcher import Sign, Watcher

_SIGNS_A_PATIENCE = 6
_LAST_CALLS = 32


class Heartbeat:
    """Place of this rank: its step, the phase it is in, and the seconds spent in each so far.

    Phases are data, forward, backward, update, log, save and validate.
    """

    def __init__(self) -> None:
        self.step = self.moves = 0
        self.phase = "start"
        self.entered = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.longest: dict[str, float] = {}

    def enter(self, phase: str) -> float:
        """Go over to a phase; return the seconds spent in the one before."""
        now = time.perf_counter()
        spent = now - self.entered
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + spent
        self.longest[self.phase] = max(self.longest.get(self.phase, 0.0), spent)
        self.phase, self.entered = phase, now
        self.moves += 1
        return spent

    def sign(self, number: int) -> Sign:
        """Return what other ranks are told."""
        return Sign(
            number=number,
            host=this_host(),
            step=self.step,
            moves=self.moves,
            phase=self.phase,
            seconds=time.perf_counter() - self.entered,
            usual=self.longest.get(self.phase, 0.0),
            waits=distributed.seconds_waited()[1],
        )


class Pulse:
    """The thread that gives a rank's signs of life, on rank 0 also the one that watches all.

    Rank 1 watches rank 0. On the first word of a hang every rank that still can gives the stacks of
    its threads and its last collective calls, and rank 0 writes them to `hang/step_N`.

    Args:
        heartbeat: of this rank.
        patience: seconds without a sign or a move after which a rank is named; None starts nothing.
        say: takes what is found.
        folder: where stacks go.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        patience: float | None,
        say: Callable[[str], None],
        folder: Path,
    ) -> None:
        self._heartbeat, self._patience, self._folder = heartbeat, patience, folder
        self._rank, self._ranks = distributed.rank(), distributed.world_size()
        self._say = say if self._rank == 0 else lambda text: print(text, file=sys.stderr)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        # Of hangs: the number of those that were asked about, and ranks that have not answered.
        self._asked, self._missing, self._place = 0, set[int](), folder

    def __enter__(self) -> Pulse:
        if self._patience is not None:
            arguments = distributed.own_store(), self._patience
            self._thread = threading.Thread(
                target=self._run, args=arguments, name="heartbeat", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # the store may be gone

    def _run(self, store: Any, patience: float) -> None:
        watched = range(self._ranks) if self._rank == 0 else range(1) if self._rank == 1 else None
        watcher = None if watched is None else Watcher(watched, patience)
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                # A store whose process is stopped answers nothing, and no call of it times out.
                with self._alarm(patience) if self._rank == 1 else nullcontext():
                    signs = self._exchange(store, self._heartbeat.sign(number), watched)
                if watcher is not None and signs:
                    self._tell(watcher, signs, store)
            except RuntimeError:  # the store is gone, and so is rank 0 or its launcher
                return
            self._over.wait(patience / _SIGNS_A_PATIENCE)
        with suppress(RuntimeError):
            self._exchange(store, Sign.of_end(number + 1), None)

    @contextmanager
    def _alarm(self, seconds: float) -> Iterator[None]:
        """Say that rank 0 is silent, where the block takes longer."""
        message = f"the store of the ranks, at rank 0 or its launcher, is silent for {seconds:g} s"
        timer = threading.Timer(seconds, self._say, [message])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _exchange(self, store: Any, sign: Sign, watched: range | None) -> list[Sign | None]:
        """Give a sign, and stacks if they are asked for; return those of the watched ranks."""
        if store is None:
            return [sign]
        store.set(f"sign/{self._rank}", json.dumps(sign))
        if self._rank > 0 and store.check([f"asked/{self._asked + 1}"]):
            self._asked += 1
            store.set(f"stacks/{self._asked}/{self._rank}", stacks())
        return [] if watched is None else self._read(store, watched)

    def _read(self, store: Any, watched: range) -> list[Sign | None]:
        keys = [f"sign/{rank}" for rank in watched]
        if store.check(keys):
            return [Sign(*json.loads(text)) for text in store.multi_get(keys)]
        return [None] * len(keys)  # not all have begun

    def _tell(self, watcher: Watcher, signs: list[Sign | None], store: Any) -> None:
        messages, hangs = watcher.see(signs, time.monotonic())
        for message in messages:
            self._say(message)
        if self._rank == 0:
            if hangs:
                self._ask(store)
            self._collect(store)

    def _ask(self, store: Any) -> None:
        """Begin a new record of a hang, with what rank 0 itself has to tell."""
        self._asked += 1
        self._place = self._folder / f"step_{self._heartbeat.step}"
        self._place.mkdir(parents=True, exist_ok=True)
        write_text(self._place / "rank_0.txt", stacks())
        self._missing = set(range(1, self._ranks))
        if store is not None:
            store.set(f"asked/{self._asked}", "")
        self._say(f"stacks and last collective calls of each rank: {self._place}")

    def _collect(self, store: Any) -> None:
        for rank in sorted(self._missing):
            if store.check([key := f"stacks/{self._asked}/{rank}"]):
                write_text(self._place / f"rank_{rank}.txt", store.get(key).decode())
                self._missing.remove(rank)


def stacks() -> str:
    """Return the stacks of this process's threads, and its last collective calls."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    ]
    if distributed.is_distributed():
        parts.append("last collective calls\n" + "\n".join(distributed.last_calls(_LAST_CALLS)))
    return "\n".join(parts) + "\n"
