"""Random faults, one after another, and results that are bit for bit those of a quiet run.

VLP_CHAOS says for how many seconds, VLP_CHAOS_SEED which, and VLP_CHAOS_FAULTS=300 goes on until
300 faults have come, a fifteenth of them of each kind. The same seed meets the same faults in the
same order.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import ranks
from launch_lab import STEPS
from raw_images import files_of, raw_image
from shard_server import ShardServer, manifest, serve

from data_tools.__main__ import main as data_tools

FOREIGN = "thesis"
"""In the name of what belongs to somebody else."""

TOOLS = ranks.ROOT / "data_tools" / "__main__.py"
EVALUATION = ranks.ROOT / "evaluation" / "__main__.py"
PRETRAIN = ranks.ROOT / "launch" / "pretrain.py"


@dataclass(frozen=True)
class Job:
    """A command that writes `out` on some ranks, and goes on when it is started again."""

    name: str
    ranks: int
    command: Sequence[str | Path]
    without: frozenset[str] = frozenset()
    """Faults that it does not promise to survive."""
    shards: Sequence[str] = ()
    results: Callable[[Path], dict[str, bytes]] = field(default=files_of)
    checked: Callable[[Path], bool] = lambda path: False
    """Whether it finds damage of one of its files by itself."""


def pretrain(lab, out, url, shards):
    arguments = [
        *lab.arguments(out.name, f"output={out}", f"data.sources=[{{path: {url}}}]"),
        f"data.cache={{folder: {out.parent / 'cache'}, limit: 100MB}}",
        "data.outages={seconds: 4, policy: pause}",
        "data.workers=1",
        "--resume",
    ]
    return Job(
        "pretrain",
        2,
        [PRETRAIN, *arguments],
        shards=shards,
        results=_weights,
        checked=lambda path: path.parent.name.startswith("step_"),
    )


def convert(listed, images, out):
    places = ["--annotations", listed, "--images", images, "--out", out, "--processes", "2"]
    size = ["--samples-per-shard", "8", "--max-side", "220"]
    return Job(
        "convert", 1, [TOOLS, "flickr8k", *places, *size], frozenset({"store", "corrupt file"})
    )


def reshard(source, out):
    size = ["--samples-per-shard", "20", "--shuffle", "3", "--processes", "2"]
    command = [TOOLS, "reshard", source, "--out", out, *size]
    return Job("reshard", 1, command, frozenset({"store", "corrupt file"}))


def evaluate(model, shards, out):
    command = [EVALUATION, "retrieval", "--model", model, "--shards", shards, "--out", out]
    return Job("evaluate", 2, command, frozenset({"store", "second owner", "corrupt file"}))


def originals(folder, count=80):
    folder.mkdir()
    rows = []
    for number in range(count):
        (folder / f"{number}.jpg").write_bytes(raw_image(number, (240, 180)))
        sentence = {"raw": f"image {number}"}
        rows.append({"filename": f"{number}.jpg", "split": "train", "sentences": [sentence]})
    listed = folder / "toy.json"
    listed.write_text(json.dumps({"dataset": "toy", "images": rows}))
    return listed, folder


def small_shards(source, out):
    assert data_tools(["reshard", str(source), "--out", str(out), "--samples-per-shard", "25"]) == 0
    return out


def _weights(out):
    step = out / "checkpoints" / f"step_{STEPS}"
    paths = [step / f"{name}.safetensors" for name in ("weights", "optimiser", "extra")]
    return {path.name: path.read_bytes() for path in (*paths, out / "model/model.safetensors")}


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
        result = []
        for rank in self.started:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(rank.process.pid)
                result += [process, *process.children(recursive=True)]
        return result

    def signal(self, number):
        with suppress(ProcessLookupError):
            os.kill(self.rng.choice(self.started).process.pid or 0, number)

    def files(self):
        result = [path for path in sorted(self.out.rglob("*")) if path.is_file()]
        return [path for path in result if FOREIGN not in path.name and path.stat().st_size]


def kill_all(scene):
    """As when the power goes."""
    for process in scene.family():
        with suppress(psutil.NoSuchProcess):
            process.kill()


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
    [(code, output)] = ranks.finish(again, timeout=120)
    assert code in (0, 2), output
    alive = any(rank.process.is_alive() for rank in scene.started)
    if here and alive:
        assert "is being written by process" in output, output


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


BEFORE = {"corrupt file": corrupt, "clock": clock, "store": store}
"""Met by a start after a power cut."""

DURING = {
    "kill": lambda scene: scene.signal(signal.SIGKILL),
    "power cut": kill_all,
    "SIGTERM": lambda scene: scene.signal(signal.SIGTERM),
    "SIGINT": lambda scene: scene.signal(signal.SIGINT),
    "full disk": full_disk,
    "second owner": second_owner,
}
"""Met at a random moment."""


SECONDS = float(os.environ.get("VLP_CHAOS", "900"))
SEED = int(os.environ.get("VLP_CHAOS_SEED", "30"))
FAULTS = int(os.environ.get("VLP_CHAOS_FAULTS", "0"))
"""The run ends at this many, where at least a fifteenth of them were of each kind; 0: by time."""
ORDERLY = {0, 1, 2, 75, 130, -2, -9, -15}
"""Exit codes under faults: an end, an error in a sentence, a stop, a signal."""
_TRACEBACK = r"Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n|\n)*"
_CHAINED = r"\S[^\n]*\n\nDuring handling of the above exception, another exception occurred:\n\n"
INTERRUPTED = re.compile(rf"(?:{_TRACEBACK}{_CHAINED})*{_TRACEBACK}KeyboardInterrupt:?[^\n]*")
"""What Python itself says of a Ctrl-C before a command looks for it, or in a callback of Python's
own, where it is lost; it may come while Python handles an exception that it expects."""


@pytest.fixture
def server(lab, tmp_path):
    with serve(small_shards(lab.folder / "scenes" / "train", tmp_path / "shards")) as server:
        manifest(server)
        yield server


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS * 2 + 600)
def test_faults_change_nothing(lab, server, tmp_path, capsys):
    rng, survived, quiet = random.Random(SEED), Counter[tuple[str, str]](), {}
    shards = sorted(path.name for path in server.folder.glob("*.tar"))
    outs = {name: tmp_path / name for name in ("pretrain", "convert", "reshard", "evaluate")}
    jobs = [
        pretrain(lab, outs["pretrain"], server.url, shards),
        convert(*originals(tmp_path / "raw"), outs["convert"]),
        reshard(server.folder, outs["reshard"]),
    ]
    lasts = {}
    decks = {name: [] for name in outs}
    for job in jobs:
        quiet[job.name], lasts[job.name] = undisturbed(job, outs[job.name])
    shutil.copytree(outs["pretrain"] / "model", tmp_path / "model")
    jobs.append(evaluate(tmp_path / "model", server.folder, outs["evaluate"]))
    quiet["evaluate"], lasts["evaluate"] = undisturbed(jobs[-1], outs["evaluate"])
    scarce = (BEFORE | DURING).keys() & frozenset.intersection(*(job.without for job in jobs[1:]))
    end, turn = time.monotonic() + SECONDS, 0
    try:
        while turn < len(jobs) or (time.monotonic() < end and not enough(survived)):
            job = jobs[turn % len(jobs)]
            turn += 1
            out = fresh(outs[job.name])
            for _ in range(rng.randint(1, 4)):
                if not decks[job.name]:
                    kinds = sorted((BEFORE | DURING).keys() - job.without)
                    kinds += 3 * sorted(scarce - job.without)
                    decks[job.name] = rng.sample(kinds, len(kinds))
                kind = decks[job.name].pop()
                moment = rng.uniform(0, 0.8 * lasts[job.name])
                codes = disturb(Scene(rng, job, out, server, []), kind, moment)
                survived[kind, job.name] += 1
                with capsys.disabled():
                    now = SECONDS - end + time.monotonic()
                    print(f"\n{now:6.1f} s {job.name}, {kind} at {moment:.1f} s: {codes}", end="")
                if not any(codes):
                    break  # it has ended, and the next fault would meet nothing
            ranks.run(job.command, job.ranks)
            result = job.results(out)
            foreign = [result.pop(name) for name in list(result) if FOREIGN in name]
            assert result == quiet[job.name], differing(result, quiet[job.name])
            assert (out / f"{FOREIGN}.txt").read_text() == "mine"
            assert all(content == b"mine" for content in foreign)
    finally:
        with capsys.disabled():
            print(table(survived, [job.name for job in jobs]))


def undisturbed(job, out):
    started = time.monotonic()
    ranks.run(job.command, job.ranks)
    last = time.monotonic() - started
    print(f"{job.name} takes {last:.1f} s")
    return job.results(out), last


def fresh(out):
    """The folder of a job, empty but for a file of somebody else."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(out.parent / "cache", ignore_errors=True)
    out.mkdir()
    (out / f"{FOREIGN}.txt").write_text("mine")
    return out


def disturb(scene, kind, moment):
    """Start a job that meets a fault; it ends in order, and nothing of it stays behind.

    Returns its exit codes.
    """
    if kind in BEFORE:
        scene.started = ranks.start(scene.job.command, scene.job.ranks)
        time.sleep(moment)
        kill_all(scene)
        ranks.finish(scene.started)
        BEFORE[kind](scene)
    scene.started = ranks.start(scene.job.command, scene.job.ranks)
    if kind in DURING:
        time.sleep(moment)
        family = scene.family()
        DURING[kind](scene)
    else:
        family = scene.family()
    end_others(scene.started)
    results = ranks.finish(scene.started, timeout=60)
    every = "".join(output for _, output in results)  # what all ranks would say, rank 0 says
    for code, output in results:
        assert code in ORDERLY, (kind, code, output)
        own = INTERRUPTED.sub("", output) if kind == "SIGINT" else output
        assert "Traceback" not in own, f"{scene.job.name}, {kind}: {output}"
        # A Ctrl-C may come before the fork of the test's server is the command, which says nothing.
        named = "error" in every or "lost another rank" in output or own != output
        named = named or (kind == "SIGINT" and not output)
        assert code != 1 or named, (kind, every)
    _, orphans = psutil.wait_procs(family, timeout=40)
    assert not orphans, (kind, [(orphan, orphan.cmdline()) for orphan in orphans])
    for troubles in (scene.server.fails, scene.server.halves, scene.server.stalls):
        troubles.clear()
    scene.server.others.clear()
    return [code for code, _ in results]


def end_others(started, seconds=120):
    """Do what launchers do: where one rank has failed, tell the others to end, here a bit later.

    One may wait for a rank that was killed before they met.
    """
    end = time.monotonic() + seconds
    while any(rank.process.is_alive() for rank in started) and time.monotonic() < end:
        if any(rank.process.exitcode for rank in started):
            end = min(end, time.monotonic() + 5)
        time.sleep(0.05)
    for rank in started:
        if rank.process.is_alive():
            rank.process.terminate()


def enough(survived):
    """Tell whether as many faults have come as were asked for, of each kind."""
    kinds = Counter[str]()
    for (kind, _), count in survived.items():
        kinds[kind] += count
    each = min(kinds[kind] for kind in BEFORE | DURING)
    return bool(FAULTS) and survived.total() >= FAULTS and each >= FAULTS / 15


def differing(found, expected):
    names = sorted(found.keys() | expected.keys())
    return [name for name in names if found.get(name) != expected.get(name)]


def table(survived, jobs):
    lines = [f"\nseed {SEED}: {survived.total()} faults survived"]
    lines.append("".join(f"{word:>14}" for word in ("", *jobs)))
    for kind in BEFORE | DURING:
        counts = [survived[kind, job] for job in jobs]
        lines.append("".join(f"{word:>14}" for word in (kind, *counts)))
    return "\n".join(lines)
