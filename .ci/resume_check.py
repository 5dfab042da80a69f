"""A short real pretraining on two DeepSpeed ranks, killed without warning and resumed.

Everything goes through the public commands, as a user would run them; `make resume-check` and CI
call it. Ends with 1 when the resumed run did not continue at the checkpoint, or did not finish.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vlp.training.engines.environment import free_port

ROOT = Path(__file__).resolve().parents[1]
STEPS, CHECKPOINT_EVERY, KILL_AFTER = 16, 5, 7
# Seconds until the first steps must be logged; the first start on a machine compiles.
START_LIMIT = 600.0


def main() -> int:
    """Train, kill, resume, evaluate; returns the exit code."""
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="vlp-resume-") as folder:
        return _check(Path(folder))


def _check(folder: Path) -> int:
    shards, run = folder / "shards", folder / "run"
    _tool("data_tools", "scenes", "--out", shards, "--train", 400, "--val", 32)
    arguments = ("--size", 256, "--out", shards / "vocabulary")
    _tool("data_tools", "vocabulary", "--shards", shards / "train", *arguments)
    launcher = (str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2")
    script = [
        "launch/pretrain.py",
        *("--config", "configs/pretrain/scenes_tiny.yaml"),
        f"output={run}",
        f"data.sources=[{{path: {shards / 'train'}}}]",
        f"data.vocabulary={shards / 'vocabulary'}",
        *(
            "training.batch=32",
            "objectives.itm.group=16",
            f"training.steps={STEPS}",
            "training.log_every=1",
        ),
        f"training.checkpoint_every={CHECKPOINT_EVERY}",
    ]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}

    print(f"== a run of {STEPS} steps, killed after step {KILL_AFTER}", flush=True)
    start = [*launcher, "--master_port", str(free_port()), *script]
    process = subprocess.Popen(start, env=environment, start_new_session=True)
    _wait_for_step(run / "log.jsonl", KILL_AFTER, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    print(f"== killed; checkpoints: {', '.join(checkpoints)}; resuming", flush=True)

    resume = [*launcher, "--master_port", str(free_port()), *script, "--resume"]
    subprocess.run(resume, env=environment, check=True)
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    print(f"== resumed at {report['resumed_at_steps']}, ended {report['ended']}", flush=True)
    _tool("evaluation", "retrieval", "--model", run / "model", "--shards", shards / "val")
    passed = report["resumed_at_steps"] == [CHECKPOINT_EVERY] and report["ended"] == "finished"
    return 0 if passed else 1


def _wait_for_step(log: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        if log.exists() and len(log.read_text(encoding="utf-8").splitlines()) >= step:
            return
        if process.poll() is not None:
            sys.exit(f"the run ended with code {process.returncode} before step {step}")
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    sys.exit(f"no step {step} within {START_LIMIT:.0f} s")


def _tool(module: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main())
