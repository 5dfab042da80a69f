"""A toy run in a process of its own, killed before a step of the thread that writes checkpoints.

usage: killed_run.py FOLDER STEP. Where STEP is `none` the steps are counted into a file beside.
"""

import sys
from pathlib import Path

import torch
from killed_steps import killed_at
from training_toy import PlainEngine, ToyData, ToyTask, toy_config

from vlp.training.loop import train
from vlp.training.run_folder import RunFolder


def run(folder, resume=False, **training):
    torch.manual_seed(0)
    config, task = toy_config(folder, trackers=[], **training), ToyTask()
    engine = PlainEngine(task, config.training)
    train(config, task, ToyData(), engine, RunFolder(folder, resume), resume)
    return task


if __name__ == "__main__":
    step = None if sys.argv[2] == "none" else int(sys.argv[2])
    killed_at(step, run, Path(sys.argv[1]), "checkpoint")
