"""Pretraining: `objectives.py` holds the objectives, `task.py` composes them.

A new objective is a subclass of `Objective` and a call `register_objective(...)` in a module that
is imported before the configuration is read. Losses are summed in the order of registration.
"""

from vlp.tasks.pretraining.objectives import (
    Contrastive,
    ImageTextMatching,
    MaskedImageModelling,
    MaskedLanguageModelling,
    Objective,
    SigmoidContrastive,
    Step,
    Term,
    TokenTerms,
    register_objective,
)
from vlp.tasks.pretraining.task import Pretraining

__all__ = ["Objective", "Pretraining", "Step", "Term", "register_objective"]

register_objective("contrastive", Contrastive)
register_objective("sigmoid", SigmoidContrastive)
register_objective("token", TokenTerms)
register_objective("itm", ImageTextMatching)
register_objective("mlm", MaskedLanguageModelling)
register_objective("mim", MaskedImageModelling)
