"""Benchmarks of data loading."""
