"""Commands of `vlp evaluate` and related ones, with imports inside, so that help is quick."""
