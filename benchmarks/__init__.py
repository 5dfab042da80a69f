"""Timings against other libraries, and a GPU check: `python -m benchmarks COMMAND`."""
