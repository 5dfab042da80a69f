"""Predictions of a pretraining before it starts: ranks, memory, time and communication."""
