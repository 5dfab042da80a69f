"""Faults that a running job meets, or finds when it starts."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ranks
from chaos_jobs import FOREIGN, Job
from shard_server import ShardServer

# A file may grow to this many bytes on a "full disk": what a rank prints fits, shards do not.
ROOM = 32 * 1024


@dataclass
class Scene:
    """A job at work (or about to be), with all that can go wrong about it."""

    rng: random.Random
    job: Job
    out: Path
    server: ShardServer
    started: list[ranks.Rank]

    def family(self):
        """The job's processes with all that they started."""
        found = []
        for rank in self.started:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(rank.process.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def signal(self, number):
        with suppress(ProcessLookupError):
            os.kill(self.rng.choice(self.started).process.pid or 0, number)

    def files(self):
        found = [path for path in sorted(self.out.rglob("*")) if path.is_file()]
        return [path for path in found if FOREIGN not in path.name and path.stat().st_size]


def kill(scene):
    scene.signal(signal.SIGKILL)


def kill_all(scene):
    """As when the power goes."""
    for process in scene.family():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def terminate(scene):
    scene.signal(signal.SIGTERM)


def interrupt(scene):
    scene.signal(signal.SIGINT)


def full_disk(scene):
    for process in scene.family():
        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, hard))


def second_owner(scene):
    """It may come when the first one has ended, and then finds everything done."""
    end = time.monotonic() + 60
    while time.monotonic() < end and any(rank.process.is_alive() for rank in scene.started):
        if any(scene.out.rglob(".lock-*")):
            break
        time.sleep(0.05)
    here = any(rank.process.is_alive() for rank in scene.started)
    again = ranks.start(scene.job.command, 1)
    [(code, said)] = ranks.finish(again, timeout=120)
    assert code in (0, 2), said
    alive = any(rank.process.is_alive() for rank in scene.started)
    if here and alive:
        assert "is being written by process" in said, said


def store(scene):
    """Errors, a stall, a cut and other bytes under the same name."""
    for path in (scene.out.parent / "cache").rglob("*.tar.*"):
        path.unlink()
    how = scene.rng.choice(["fails", "halves", "stalls", "others"])
    scene.server.status = scene.rng.choice([429, 500, 503])
    for name in scene.rng.sample(scene.job.shards, 2):
        getattr(scene.server, how)[name] = scene.rng.choice([1, 2, 5])


def corrupt(scene):
    """Cut or turn over bytes of the newest file that the job alone is to read."""
    files = [path for path in scene.files() if scene.job.checked(path)]
    if files:
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        data = bytearray(newest.read_bytes())
        place = scene.rng.randrange(len(data))
        if scene.rng.random() < 0.5:
            data[place] ^= 0xFF
        else:
            del data[place:]
        newest.write_bytes(data)


def clock(scene):
    """The clock that files were written by went wrong by a day."""
    day = time.time() + scene.rng.choice([-86400, 86400])
    for path in scene.files():
        os.utime(path, (day, day))


Fault = Callable[[Scene], None]

BEFORE = {"corrupt file": corrupt, "clock": clock, "store": store}
"""Met by a start after a power cut."""

DURING = {
    "kill": kill,
    "power cut": kill_all,
    "SIGTERM": terminate,
    "SIGINT": interrupt,
    "full disk": full_disk,
    "second owner": second_owner,
}
"""Met at a random moment."""
