"""Checks of a machine with GPUs, `vlp check gpu`, and predictions for machines without one."""
