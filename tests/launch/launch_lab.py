from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import ranks
from safetensors.torch import load_file

COMMAND = ranks.ROOT / "launch" / "pretrain.py"
FAILING = Path(__file__).with_name("failing_pretrain.py")
STEPS, CHECKPOINT_EVERY = 12, 4
ENDLESS = ("training.steps=100000", "training.checkpoint_every=100000")


def started(command, stdout=subprocess.PIPE, environment=None, **options):
    """A process on the CPU outside of any launcher."""
    plain = {key: v for key, v in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    plain |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        env=plain | (environment or {}),
        cwd=ranks.ROOT,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def until(true, seconds=120, said=lambda: ""):
    """Wait for a condition; an error has what `said` returns."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, said()
        time.sleep(0.05)


@dataclass
class Lab:
    folder: Path
    config: Path

    def output(self, name):
        return self.folder / name

    def arguments(self, name, *more):
        return ["--config", str(self.config), f"output={self.output(name)}", *more]

    def zero(self, stage):
        """A ZeRO file; stage 3 cuts up every parameter, however small."""
        path = self.folder / f"zero{stage}.json"
        values = {"stage": stage}
        if stage == 3:
            values["stage3_param_persistence_threshold"] = 0
        path.write_text(json.dumps({"zero_optimization": values}))
        return f"training.engine={path}"

    def train(self, name, *more, world_size=1):
        """Run to a good end on all ranks; returns rank 0's output."""
        return ranks.run([COMMAND, *self.arguments(name, *more)], world_size)

    def ended(self, name, *more, codes=(0,), how=()):
        """Run with an exit code for each rank and no traceback; returns what each printed."""
        script = [FAILING, *how] if how else [COMMAND]
        command = [*script, *self.arguments(name, *more)]
        results = ranks.finish(ranks.start(command, len(codes)))
        printed = [output for _, output in results]
        assert [code for code, _ in results] == list(codes), results
        assert "Traceback" not in "".join(printed), printed
        return printed

    def steps(self, name):
        log = self.output(name) / "log.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def log(self, name):
        lines = (self.output(name) / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def report(self, name):
        result = json.loads((self.output(name) / "report.json").read_text())
        return result

    def saved_steps(self, name):
        folders = (self.output(name) / "checkpoints").glob("step_*[0-9]")
        return sorted(int(folder.name.removeprefix("step_")) for folder in folders)

    def begin_with(self, source, step, name):
        folder = f"checkpoints/step_{step}"
        shutil.copytree(self.output(source) / folder, self.output(name) / folder)

    def weights(self, name, step):
        return load_file(self.output(name) / f"checkpoints/step_{step}/weights.safetensors")
