import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ranks
from launch_lab import COMMAND, ENDLESS, started, until

from vlp.training.checkpoints import verify
from vlp.training.stop_requests import REQUEUE

PROGRAMS = Path(sys.executable).parent
LAUNCHERS = {
    "deepspeed": [PROGRAMS / "deepspeed", "--num_accelerators", "2", "--no_python"],
    "accelerate": [
        *(PROGRAMS / "accelerate", "launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--no_python", "--main_process_port", "0"),
    ],
    "vlp": [sys.executable, "-m", "launch", "train", "--ranks", "2"],
    "torchrun": [PROGRAMS / "torchrun", "--standalone", "--nproc_per_node", "2", "--no_python"],
}
# A shell between launcher and rank, which writes the rank's exit code and passes it on.
RANK = """#!/bin/bash
"{python}" "{command}" "$@"
code=$?
echo $code > "{folder}/code.$RANK"
exit $code
"""


class Launched:
    def __init__(self, lab, launcher, name, *more):
        self.lab, self.name = lab, name
        self.folder = lab.folder / f"{name}_codes"
        self.folder.mkdir()
        rank = self.folder / "rank.sh"
        rank.write_text(RANK.format(python=sys.executable, command=COMMAND, folder=self.folder))
        rank.chmod(0o755)
        more += (*ENDLESS, "training.keep_last=2")
        port = ["--master_port", str(ranks.free_port())] if launcher == "deepspeed" else []
        ran = [] if launcher == "vlp" else [rank]
        self.said = self.folder / "said.txt"
        with self.said.open("wb") as file:
            command = [*LAUNCHERS[launcher], *port, *ran, *lab.arguments(name, *more)]
            self.process = started(command, file, start_new_session=True)
        until(lambda: lab.steps(name) >= 3, said=self.said.read_text)
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.node = next((p for p in family if "deepspeed.launcher.launch" in p.cmdline()), None)
        running = [p for p in family if "bash" not in p.cmdline()[0] and "RANK" in p.environ()]
        parents = [p for p in running if p.parent() not in running]  # no loader's processes
        self.ranks = sorted(parents, key=lambda process: int(process.environ()["RANK"]))
        assert len(self.ranks) == 2
        self.family = family

    def code(self, rank):
        file = self.folder / f"code.{rank}"
        until(lambda: file.exists() and bool(file.read_text()), 5, self.said.read_text)
        return int(file.read_text())

    def end(self):
        alive = psutil.Process.is_running
        until(lambda: not any(map(alive, self.ranks)), 30, self.said.read_text)


@contextmanager
def running(lab, launcher, name, *more):
    run = Launched(lab, launcher, name, *more)
    try:
        yield run
    finally:
        for process in run.family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        run.process.kill()
        run.process.wait()


def require_stopped(run):
    """The run ended after a whole step, and its checkpoint is good."""
    report = run.lab.report(run.name)
    assert report["ended"] == "stopped"
    assert report["samples"] == 8 * report["step"]
    assert verify(run.lab.output(run.name) / "checkpoints" / f"step_{report['step']}") is None
    assert f"after step {report['step']}; continue with --resume" in run.said.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["deepspeed", "accelerate", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_what_ends_a_launcher_ends_its_ranks_with_a_checkpoint(launcher, number, lab):
    with running(lab, launcher, f"{launcher}_{number.name}") as run:
        run.process.send_signal(number)
        run.end()
        assert run.process.wait(30) != 0
        require_stopped(run)


@pytest.mark.nightly
def test_a_signal_to_one_rank_and_its_loader_stops_all(lab):
    with running(lab, "deepspeed", "one_rank", "data.workers=1") as run:
        for process in [*run.ranks[1].children(recursive=True), run.ranks[1]]:
            process.send_signal(signal.SIGTERM)
        assert run.process.wait(60) == REQUEUE
        require_stopped(run)


@pytest.mark.nightly
def test_ranks_outlive_the_process_that_started_them_by_one_step(lab):
    """Nobody is left to signal them, and a shell stands between."""
    with running(lab, "deepspeed", "node") as run:
        assert run.node is not None
        run.node.kill()
        run.end()
        require_stopped(run)
        assert [run.code(0), run.code(1)] == [REQUEUE, REQUEUE]


@pytest.mark.nightly
def test_a_rank_that_waits_for_another_ends_without_a_step(lab):
    with running(lab, "torchrun", "blocked") as run:
        run.ranks[1].suspend()
        time.sleep(3)  # rank 0 is now in a collective
        run.process.kill()
        until(lambda: not run.ranks[0].is_running(), 30, run.said.read_text)
        assert run.code(0) == REQUEUE
        run.ranks[1].resume()
        run.end()
        assert "in the midst of a step" in run.said.read_text()
        assert not list((lab.output("blocked") / "checkpoints").glob("*"))


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_vlp_says_what_its_ranks_said(number, lab):
    with running(lab, "vlp", f"vlp_{number.name}") as run:
        run.process.send_signal(number)
        run.end()
        assert run.process.wait(30) == REQUEUE
        require_stopped(run)
