"""The commands of `python -m evaluation`: each module has `add_arguments(parser)`, `run(options)`.

A module's docstring is its help.
"""
