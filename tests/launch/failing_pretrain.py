"""`launch/pretrain.py`, but one rank meets a disaster at a batch.

usage: failing_pretrain.py (kill | raise | full) RANK BATCH ARGUMENT…
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import pretrain

how, rank, number, *arguments = sys.argv[1:]
build = pretrain.build


def failing(config: Any) -> tuple[Any, Any]:
    task, data = build(config)
    batches = data.batches

    def until_disaster(*wanted: int) -> Iterator[Any]:
        for count, found in enumerate(batches(*wanted)):
            if count == int(number) and os.environ["RANK"] == rank:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raise":
                    raise RuntimeError("the disaster of this test")
                # From here on the system refuses large files, as a full disk would.
                resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, -1))
            yield found

    data.batches = until_disaster
    return task, data


pretrain.build = failing
sys.exit(pretrain.main(arguments))
