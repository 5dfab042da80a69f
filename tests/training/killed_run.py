"""A toy run in a process of its own, killed before a step of the thread that writes checkpoints.

usage: killed_run.py FOLDER STEP. Where STEP is `none` the steps are counted into a file beside.
"""

import sys
from pathlib import Path

import training_toy
from killed_steps import killed_at


def run(folder, **options):
    return training_toy.run(folder, trackers=[], **options)


if __name__ == "__main__":
    step = None if sys.argv[2] == "none" else int(sys.argv[2])
    killed_at(step, run, Path(sys.argv[1]), "checkpoint")
