"""Measured speeds, one command each: `python -m evaluation.benchmarks.NAME`."""
