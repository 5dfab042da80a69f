"""The Slurm script under stand-ins for `srun` and `scontrol` that start two tasks here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from launch_lab import Lab

SCRIPT = ranks.ROOT / "launch" / "cluster" / "pretrain.slurm"
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" > "$CALLED"; fi
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done
wait %1 && wait %2
"""


def submit(folder: Path, srun: str, arguments: list[str]) -> str | None:
    """Run the script; returns what it asked of `scontrol` at its end."""
    programs, called = folder / "bin", folder / "called"
    programs.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", srun)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=ranks.ROOT,
        check=True,
        env=os.environ
        | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "CALLED": str(called),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "node",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        timeout=240,
    )
    return called.read_text().strip() if called.exists() else None


@pytest.mark.distributed
def test_tasks_become_ranks_of_one_run(lab: Lab, tmp_path: Path) -> None:
    _, config, *overrides = lab.arguments("slurm", "training.steps=2")
    assert submit(tmp_path, SRUN, [config, *overrides]) is None
    assert lab.report("slurm")["ended"] == "finished"
    assert lab.report("slurm")["ranks"] == 2


def test_a_stopped_run_goes_back_into_the_queue(lab: Lab, tmp_path: Path) -> None:
    _, config, *overrides = lab.arguments("requeued")
    lab.output("requeued").mkdir()
    report = lab.output("requeued") / "report.json"
    written = json.dumps({"ended": "stopped"}, indent=1)  # as `write_report` writes it
    stopped = f"#!/bin/bash\ncat > {report} <<'END'\n{written}\nEND\n"
    assert submit(tmp_path, stopped, [config, *overrides]) == f"requeue {os.getpid()}"
