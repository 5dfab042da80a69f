"""The interface of a pretraining objective, and the registry of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from vlp.config import Config
from vlp.data.stream.batch import Batch
from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import ImageKeys
from vlp.models.features import ImageFeatures, TextFeatures
from vlp.models.vlp import VLPModel
from vlp.objectives.config import ObjectivesConfig, register_settings
from vlp.objectives.loss import Loss
from vlp.positions.anchor_field import AnchorField
from vlp.tasks.teacher import TeacherOutput

TOKENS = frozenset({"image_tokens", "text_tokens"})
"""Projections of tokens, where the model has some of their own."""


@dataclass
class Step:
    """Inputs of all objectives at one step, computed once, and the statistics they log.

    number: optimiser steps from 0. image, text: outputs of both encoders on the unmasked batch.
    teacher: outputs of the momentum teacher, if there is one. is_logged: whether a log line is due,
    so that costly statistics are computed. anchors: paths of the matching pairs, once known.
    shares: passes share the images' keys, and compute the tokens that are read. image_keys: what
    `keys` has computed.
    """

    number: int
    batch: Batch
    model: VLPModel
    image: ImageFeatures
    text: TextFeatures
    teacher: TeacherOutput | None
    is_logged: bool
    anchors: AnchorField | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    shares: bool = False
    image_keys: ImageKeys | None = None

    def keys(self) -> ImageKeys | None:
        """Return the images' keys for all passes over clean images; None where none share them."""
        if self.image_keys is None and self.shares:
            self.image_keys = self.model.cross_encoder.image_keys(self.image.states)
        return self.image_keys


class Term(NamedTuple):
    """One loss with its weight in the total."""

    loss: Loss
    weight: float


class Objective:
    """Base of the objectives; an instance is called once a step and returns its losses by name.

    An objective is built when `settings_of` finds settings for it. Its own trainable modules, given
    by `modules()`, become members of the task under the names there.

    Args:
        settings: what `settings_of` found.
        objectives: settings of all objectives.
        model: sizes of the model.
    """

    on_clean_pairs: ClassVar[bool] = False
    """True if it runs before the anchor threshold moves, as those on unmasked pairs do."""
    in_chunks: ClassVar[bool] = False
    """True if its losses are sums over sample groups, so that it can run on a few at a time."""
    saves_modules: ClassVar[bool] = True
    """True if its modules go into the model folder, beside the model's weights."""
    taught: ClassVar[bool] = False
    """True if the momentum teacher has a copy of its modules."""
    trains: frozenset[str] = frozenset({"cross_encoder", "match_head"}) | TOKENS
    """Those of these parts that have a gradient of it; a part that no objective trains is frozen,
    as an engine would let weight decay shrink it."""

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        self.settings, self.objectives = settings, objectives

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> Any | None:
        """Return the settings under the objective's own name; None leaves the objective out."""
        return getattr(objectives, name, None)

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the objective's trainable modules by their name in the task."""
        return {}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the losses by name; statistics go into `step.statistics`."""
        raise NotImplementedError


OBJECTIVES: dict[str, type[Objective]] = {}
"""Registered objectives by name, in the order in which they run."""


def register_objective(
    name: str, objective: type[Objective], settings: type[Config] | None = None
) -> None:
    """Make an objective trainable under a name.

    Args:
        name: its name in logs, and its key in the `objectives` part of a configuration.
        objective: its class.
        settings: type of the settings under that key, where `ObjectivesConfig` has no such field.

    Raises:
        ValueError: the name is taken.
    """
    if name in OBJECTIVES:
        raise ValueError(f"an objective {name!r} is registered already")
    if settings is not None:
        register_settings(name, settings)
    OBJECTIVES[name] = objective
