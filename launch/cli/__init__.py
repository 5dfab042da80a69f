"""The command line `vlp`."""
