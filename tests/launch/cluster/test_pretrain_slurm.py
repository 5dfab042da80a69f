"""The Slurm script under stand-ins for `srun` and `scontrol` that start two tasks here."""

import os
import subprocess
import sys

import pytest
import ranks

SCRIPT = ranks.ROOT / "launch" / "cluster" / "pretrain.slurm"
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" > "$CALLED"; fi
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done
wait %1 && wait %2
"""


def submit(folder, srun, arguments):
    """Run the script; returns its exit code and what it asked of `scontrol` at its end."""
    programs, called = folder / "bin", folder / "called"
    programs.mkdir(exist_ok=True)
    called.unlink(missing_ok=True)
    for name, text in (("scontrol", SCONTROL), ("srun", srun)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=folder,
        env=os.environ
        | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "CRASHES": "2",
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
    return done.returncode, called.read_text().strip() if called.exists() else None


@pytest.mark.nightly
def test_tasks_become_ranks_of_one_run(lab, tmp_path):
    (tmp_path / "launch").symlink_to(ranks.ROOT / "launch")
    _, config, *overrides = lab.arguments("slurm", "training.steps=2")
    assert submit(tmp_path, SRUN, [config, *overrides]) == (0, None)
    assert lab.report("slurm")["ended"] == "finished"
    assert lab.report("slurm")["ranks"] == 2


def test_what_was_stopped_or_crashed_goes_back_into_the_queue(tmp_path):
    """Two crashes in a row are allowed, and a stop begins the count anew."""
    requeued = f"requeue {os.getpid()}"

    def ends(code):
        return submit(tmp_path, f"#!/bin/bash\nexit {code}\n", ["any.yaml"])

    for code in (1, 139, 75, 137, 1):
        assert ends(code) == (0, requeued)
    assert ends(1) == (1, None)
    assert ends(75) == (0, requeued)
    assert ends(1) == (0, requeued)
    assert ends(2) == (2, None)
    assert ends(0) == (0, None)
    assert not list(tmp_path.glob("*.crashes"))
