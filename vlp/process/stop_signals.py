"""Signals by which a scheduler, a launcher or a terminal asks a run to end."""

import signal

STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
"""Slurm sends USR1 and USR2 where `sbatch --signal` says so, a terminal that is closed HUP."""
