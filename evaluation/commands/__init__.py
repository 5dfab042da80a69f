"""The commands of `vlp evaluate` and their companions; each imports what it needs when it runs."""
