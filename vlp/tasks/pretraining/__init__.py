"""Pretraining: `objectives.py` holds the objectives, `task.py` composes them.

A new objective is a subclass of `Objective` and a call `register_objective(...)` in a module that
is imported before the configuration is read.
"""

from vlp.tasks.pretraining.objectives import Objective, Step, Term, register_objective
from vlp.tasks.pretraining.task import Pretraining

__all__ = ["Objective", "Pretraining", "Step", "Term", "register_objective"]
