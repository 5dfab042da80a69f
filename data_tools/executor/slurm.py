"""Tasks as arrays of Slurm jobs, whose machines share the file system with this one.

What `sbatch` needs beside the array comes from its own variables: SBATCH_PARTITION,
SBATCH_ACCOUNT, SBATCH_TIMELIMIT, SBATCH_MEM_PER_NODE. Plan and results lie in a folder of
the working directory while an array runs.
"""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from data_tools.executor.executor import Executor, Job, Result, lost_worker
from vlp.config import ConfigError
from vlp.io import atomic_write

RETRIES = 3
"""Arrays that are submitted anew for jobs without a result."""
_JOBS_OF_A_TASK = 64
_PLAN = "plan.pickle"


class SlurmExecutor(Executor):
    """Arrays of `processes` tasks, each of which does its part of some jobs, one after another.

    Raises:
        ConfigError: there is no `sbatch`.
    """

    def __init__(self, processes: int) -> None:
        if shutil.which("sbatch") is None:
            raise ConfigError("--executor slurm wants sbatch, which is not on the PATH")
        self._tasks = processes

    def results(
        self, work: Callable[[Job], Result], jobs: Iterable[Job], ordered: bool
    ) -> Iterator[Result]:
        """Yield results, in order; jobs without one are tried again by another array."""
        rest = iter(jobs)
        while some := list(islice(rest, _JOBS_OF_A_TASK * self._tasks)):
            with TemporaryDirectory(prefix=".vlp-tasks-", dir=".") as name:
                folder = Path(name).resolve()
                self._do(folder, work, some)
                for number in range(len(some)):
                    error, result = pickle.loads(_result(folder, number).read_bytes())
                    if error is not None:
                        raise error
                    yield result

    def _do(self, folder: Path, work: Callable[[Job], Any], jobs: Sequence[Job]) -> None:
        missing = dict(enumerate(jobs))
        for _ in range(1 + RETRIES):
            (folder / _PLAN).write_bytes(pickle.dumps((work, list(missing.items()))))
            _submit(folder, min(self._tasks, len(missing)))
            missing = {n: job for n, job in missing.items() if not _result(folder, n).exists()}
            if not missing:
                return
        raise lost_worker(f"{next(iter(missing.values()))}, {RETRIES + 1} times")


def _submit(folder: Path, tasks: int) -> None:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    python = [sys.executable, "-m", "data_tools.executor.slurm", str(folder)]
    command = [
        *("sbatch", "--wait", "--parsable", "--job-name=vlp-data"),
        *(f"--array=0-{tasks - 1}", f"--output={folder}/task-%a.log"),
        f"--wrap={shlex.join(['env', f'PYTHONPATH={paths}', *python])}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        array = waiting.stdout.readline().strip().partition(";")[0]
        try:
            waiting.wait()
        except BaseException:
            subprocess.run(["scancel", array], check=False)
            waiting.terminate()
            raise
    if not array:
        raise ConfigError(f"--executor slurm: sbatch refused the array (exit {waiting.returncode})")


def _result(folder: Path, number: int) -> Path:
    return folder / f"{number}.pickle"


def main(folder: Path, task: int, tasks: int) -> None:
    """Do every `tasks`-th job of the plan, from `task` on: what one task of an array does."""
    work, jobs = pickle.loads((folder / _PLAN).read_bytes())
    for number, job in jobs[task::tasks]:
        outcome: tuple[Exception | None, Any]
        try:
            outcome = None, work(job)
        except Exception as error:
            outcome = error, None
        with atomic_write(_result(folder, number), suffix=f".{task}.tmp") as file:
            pickle.dump(outcome, file)


if __name__ == "__main__":
    with suppress(FileNotFoundError):  # the command has ended and taken its folder along
        main(
            Path(sys.argv[1]),
            int(os.environ["SLURM_ARRAY_TASK_ID"]),
            int(os.environ["SLURM_ARRAY_TASK_COUNT"]),
        )
