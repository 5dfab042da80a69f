"""Timings beside peers, and a check of a GPU: `python -m benchmarks COMMAND`."""
