"""`launch/pretrain.py`, but one rank meets a disaster at a batch, or when it writes the model.

usage: failing_pretrain.py (kill | raise | full | model) RANK BATCH ARGUMENT…
       failing_pretrain.py other RANK KEY=VALUE ARGUMENT…: that rank's node has another setting
"""

import os
import resource
import signal
import sys

from launch import pretrain
from launch.cli.main import run_script

how, rank, number, *arguments = sys.argv[1:]
build = pretrain.build
if how == "other" and os.environ["RANK"] == rank:
    os.environ["LOCAL_RANK"] = "0"
    arguments.append(number)


def refuse_large_files():
    """From here on the system does so, as a full disk would."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, -1))


def failing(config):
    task, data = build(config)
    batches, save_model = data.batches, task.save_model

    def without_room(*wanted):
        refuse_large_files()
        save_model(*wanted)

    if how == "other":
        return task, data
    if how == "model":
        task.save_model = without_room
        return task, data

    def until_disaster(*wanted):
        for count, result in enumerate(batches(*wanted)):
            if count == int(number) and os.environ["RANK"] == rank:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raise":
                    raise RuntimeError("the disaster of this test")
                refuse_large_files()
            yield result

    data.batches = until_disaster
    return task, data


pretrain.build = failing
sys.exit(run_script("train", arguments))
