"""Processes of one machine that train together, started by torchrun's own agent."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def launch_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run a command of `vlp` on several ranks of this machine; returns their exit code.

    torchrun itself answers every failure with 1. Here the first rank that fails says what it was,
    and a signal, which goes on to the ranks, ends with `REQUEUE`.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from vlp.process.stop_signals import STOPS
    from vlp.training.stop.signals import REQUEUE

    handled = ",".join(number.name for number in (*STOPS, signal.SIGQUIT))
    options = ["--standalone", "--nproc_per_node", str(ranks), "--signals_to_handle", handled]
    options += ["-m", "launch.cli.main"]
    try:
        run.run(run.parse_args([*options, *arguments]))
    except SignalException:
        return REQUEUE
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code not in (REQUEUE, 2):
            print(f"error: {error}", file=sys.stderr)
        return code if code > 0 else 128 - code  # as shells name a process that a signal ended
    return 0
