"""Pretraining objectives: interface, registry, contrastive, sigmoid, token terms, ITM, MLM, MIM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.compilation import on_gpu
from vlp.config import Config
from vlp.data.stream.batch import Batch
from vlp.distributed import world_size
from vlp.layers.temperature import LearnedScale
from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import ImageFeatures, ImageKeyValues, PairIndices, TextFeatures
from vlp.models.towers import word_width
from vlp.models.vlp import VLPModel
from vlp.objectives.anchor import paper_anchor_loss
from vlp.objectives.config import (
    ContrastiveConfig,
    ITMConfig,
    MIMConfig,
    MLMConfig,
    ObjectivesConfig,
    register_settings,
)
from vlp.objectives.contrastive import (
    LearnedBias,
    itc_loss,
    positives,
    related,
    sigmoid_loss,
    soft_targets,
)
from vlp.objectives.itm import hard_negatives, itm_loss, listwise_itm_loss
from vlp.objectives.loss import Loss
from vlp.objectives.mim import MIMHead, mim_loss
from vlp.objectives.mlm import MLMHead, masked_columns, masked_positions, mlm_loss, prediction_slots
from vlp.objectives.token import phrase_loss, token_losses
from vlp.positions.anchor_field import AnchorPaths
from vlp.tasks.teacher import TeacherOutput, gather_keys

# Projections of tokens, where the model has them.
TOKENS = frozenset({"image_tokens", "text_tokens"})


@dataclass
class Step:
    """Inputs of all objectives at one step, computed once, and the statistics they log."""

    # Optimiser steps from 0.
    number: int
    batch: Batch
    model: VLPModel
    # Outputs of both encoders, and of the teacher, on the unmasked batch.
    image: ImageFeatures
    text: TextFeatures
    teacher: TeacherOutput | None
    # Whether a log line is due and costly statistics are computed.
    is_logged: bool
    statistics: dict[str, Tensor] = field(default_factory=dict)
    # Whether passes share the images' keys and values; `image_key_values` caches them.
    shares_images: bool = False
    image_kv: ImageKeyValues | None = None

    def image_key_values(self) -> ImageKeyValues | None:
        """Return the keys and values for all passes over clean images; None without sharing."""
        if self.image_kv is None and self.shares_images:
            self.image_kv = self.model.cross_encoder.image_key_values(self.image.states)
        return self.image_kv


class Term(NamedTuple):
    """One loss with its weight."""

    loss: Loss
    weight: float
    # Detached paths of the B matching pairs, if computed.
    anchors: AnchorPaths | None = None


class Objective:
    """Base of the objectives; an instance is called once a step and returns its losses by name.

    An objective is built when `settings_of` finds settings for it. `modules()` gives trainable
    modules, which become members of the task under their names.

    Args:
        settings: result of `settings_of`.
    """

    # True if it runs before the anchor threshold moves, as objectives on unmasked pairs do.
    on_clean_pairs: ClassVar[bool] = False
    # True if its losses are sums over sample groups, so that it can run on a few at a time.
    in_chunks: ClassVar[bool] = False
    # True if its modules go into the model folder.
    saves_modules: ClassVar[bool] = True
    # True if the momentum teacher has a copy of its modules.
    has_teacher_copy: ClassVar[bool] = False
    # Parts with a gradient of it; other parts are frozen, else weight decay would shrink them.
    trains: frozenset[str] = frozenset({"cross_encoder", "match_head"}) | TOKENS

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


# By name, in the order in which they run and their losses are summed.
OBJECTIVES: dict[str, type[Objective]] = {}


def register_objective(
    name: str, objective: type[Objective], settings: type[Config] | None = None
) -> None:
    """Register an objective by its name in logs and its key in the `objectives` configuration.

    Args:
        settings: type of the settings under that key, where `ObjectivesConfig` has no such field.
    """
    if name in OBJECTIVES:
        raise ValueError(f"an objective {name!r} is registered already")
    if settings is not None:
        register_settings(name, settings)
    OBJECTIVES[name] = objective


# Delta of Eq. 2, as the paper sets it.
PAPER_MARGIN = 0.05
# Start of the learned bias of the sigmoid loss, as SigLIP's: nearly all pairs are no matches.
SIGMOID_BIAS = -10.0
# Start of the learned tau; from 5 or 20 fewer words point right (configs/ablation/results).
TOKEN_SCALE = 10.0


class Contrastive(Objective):
    """Match images and captions against the keys of all ranks and the teacher's queue.

    Inputs: features of the unmasked batch, and a teacher's keys and soft targets. The paper's form
    (Eqs 1-2) reads tokens, and no soft targets. Loss: `contrastive`.
    """

    on_clean_pairs: ClassVar[bool] = True
    settings: ContrastiveConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.trains = TOKENS if settings.is_paper_form else frozenset()

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> ContrastiveConfig | None:
        """Return the settings unless their kind is `sigmoid`, an objective of its own."""
        contrastive = objectives.contrastive
        return contrastive if contrastive and contrastive.kind != "sigmoid" else None

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over the batch's rows."""
        settings, batch, teacher = self.settings, step.batch, step.teacher
        image, text = step.image.feature, step.text.feature
        keys = teacher.keys if teacher else gather_keys(step.image, step.text, batch)
        positive = positives(batch.pair_ids, keys.image_ids)
        # The first keys are those of all ranks' batches.
        links = keys.image_ids[: len(batch.valid) * world_size()]
        no_link = ~related(batch.pair_ids, links, links)
        no_link = functional.pad(no_link, (0, len(keys.valid) - len(links)), value=True)
        candidate_valid = keys.valid & (positive | no_link)
        if settings.is_paper_form:
            loss = paper_anchor_loss(
                image,
                text,
                keys.image,
                keys.text,
                positive,
                step.image.tokens,
                step.text.tokens,
                batch.word_mask,
                settings.scale,
                PAPER_MARGIN,
                batch.valid,
                candidate_valid,
            )
            return {"contrastive": Term(loss, settings.weight)}
        soft = None
        if teacher and teacher.alpha > 0:
            soft = soft_targets(
                teacher.image.feature,
                teacher.text.feature,
                keys.image,
                keys.text,
                pair_temperature(step.model, self.objectives),
                candidate_valid,
            )
        loss = itc_loss(
            image,
            text,
            keys.image,
            keys.text,
            positive,
            step.model.temperature(),
            batch.valid,
            candidate_valid,
            soft,
            teacher.alpha if teacher else 0.0,
        )
        return {"contrastive": Term(loss, settings.weight)}


def pair_temperature(model: VLPModel, objectives: ObjectivesConfig) -> Tensor | float:
    """Return the temperature of pair similarities; 1 / lambda unless the loss learns it."""
    contrastive = objectives.contrastive
    if contrastive and contrastive.is_paper_form:
        return 1 / contrastive.scale
    return model.temperature().detach()


class SigmoidContrastive(Objective):
    """Tell whether an image and a text belong together, for all pairs of all ranks.

    Inputs: features of the unmasked batch. The model's temperature scales cosines; the paper starts
    it at 0.1. Loss: `contrastive`.
    """

    on_clean_pairs: ClassVar[bool] = True
    trains = frozenset()
    saves_modules: ClassVar[bool] = False
    settings: ContrastiveConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.bias = LearnedBias(SIGMOID_BIAS)

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> ContrastiveConfig | None:
        """Return the contrastive objective's settings where its kind is `sigmoid`."""
        contrastive = objectives.contrastive
        return contrastive if contrastive and contrastive.kind == "sigmoid" else None

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the learned bias."""
        return {"sigmoid_bias": self.bias}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over the batch's images."""
        batch = step.batch
        loss = sigmoid_loss(
            step.image.feature,
            step.text.feature,
            batch.pair_ids,
            batch.valid,
            step.model.temperature(),
            self.bias(),
        )
        return {"contrastive": Term(loss, self.settings.weight)}


class TokenTerms(Objective):
    """Train tokens inside sample groups, with the weight of the contrastive objective.

    Inputs: tokens of the unmasked batch. Losses: `token` (captions find images), `word` (single
    words find images), `phrase` (words follow a neighbour that points). Logs `token_scale`.
    """

    on_clean_pairs: ClassVar[bool] = True
    trains = TOKENS
    saves_modules: ClassVar[bool] = False
    in_chunks: ClassVar[bool] = True
    settings: ContrastiveConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.scale = LearnedScale(TOKEN_SCALE)

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> ContrastiveConfig | None:
        """Return the contrastive objective's settings where its form has token terms."""
        contrastive = objectives.contrastive
        return contrastive if contrastive and contrastive.has_token_term else None

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the learned scale tau."""
        return {"token_scale": self.scale}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the losses over rows (`token`) and words (the others)."""
        batch, token, weight = step.batch, self.settings.token, self.settings.weight
        captions, words = token_losses(
            step.image.tokens,
            step.text.tokens,
            batch.word_mask,
            batch.text_ids,
            batch.pair_ids,
            batch.valid,
            self.scale(),
            token.group,
        )
        terms = {
            "token": Term(captions, weight * token.weight),
            "word": Term(words, weight * token.words),
        }
        if token.phrases:
            phrases = phrase_loss(step.image.tokens, step.text.tokens, batch.word_mask, batch.valid)
            terms["phrase"] = Term(phrases, weight * token.phrases)
        if step.is_logged:
            step.statistics["token_scale"] = self.scale().detach()
        return terms


class ImageTextMatching(Objective):
    """Tell matching pairs from each image with a wrong text and each text with a wrong image.

    Inputs: both encoders' outputs on the unmasked batch; `uniform` draws the negatives. Loss:
    `itm`, of pairs or of lists, with the anchor paths of the matching pairs. Logs `itm_accuracy`.
    """

    on_clean_pairs: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True
    settings: ITMConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        tokens = TOKENS if model.cross.token_score else frozenset()
        self.trains = tokens | {"cross_encoder", "match_head"}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over matching pairs and their negatives."""
        batch, image, text = step.batch, step.image, step.text
        with torch.no_grad(), torch.autocast(batch.pixels.device.type, enabled=False):
            temperature = pair_temperature(step.model, self.objectives)
            similarity = image.feature @ text.feature.T / temperature
        settings, count = self.settings, self.settings.listwise or 1
        negatives = hard_negatives(
            similarity, batch.pair_ids, batch.valid, batch.uniform, settings.group, count
        )
        rows = torch.arange(len(batch.valid), device=batch.valid.device)
        anchor_rows = rows.repeat_interleave(count)
        pairs = PairIndices(
            texts=torch.cat([rows, negatives.text_for_image, anchor_rows]),
            images=torch.cat([rows, anchor_rows, negatives.image_for_text]),
        )
        # Pooling by [CLS] reads one state of each text, so the last layer computes no other.
        image_kv, query_indices = step.image_key_values(), None
        if image_kv is not None and step.model.config.cross.pooling == "cls":
            query_indices = torch.zeros_like(pairs.texts)[:, None]
        features = step.model.cross(
            image, text, pairs, need_image=False, image_kv=image_kv, query_indices=query_indices
        )
        logits = step.model.match_logits(features)
        anchors = features.anchors
        if anchors is not None:
            anchors = anchors.map(lambda part: part[: len(rows)].detach())
        if settings.listwise is None:
            wrong_labels = torch.zeros_like(anchor_rows)
            labels = torch.cat([torch.ones_like(rows), wrong_labels, wrong_labels])
            mask = torch.cat([batch.valid, negatives.has_text, negatives.has_image])
            hits = (logits.detach().argmax(-1) == labels) & mask
            step.statistics["itm_accuracy"] = hits.sum() / mask.sum().clamp(min=1)
            return {"itm": Term(itm_loss(logits, labels, mask), settings.weight, anchors)}
        # Two lists a row: its image with wrong texts, its text with wrong images.
        odds = (logits[:, 1] - logits[:, 0]).split([len(rows), 2 * len(anchor_rows)])
        matched, wrong = odds[0].repeat(2), odds[1].unflatten(0, (-1, count))
        mask = torch.cat([negatives.has_text, negatives.has_image])[::count]
        mask = mask & batch.valid.repeat(2)
        correct = (matched > wrong.amax(1)).detach() & mask
        step.statistics["itm_accuracy"] = correct.sum() / mask.sum().clamp(min=1)
        return {"itm": Term(listwise_itm_loss(matched, wrong, mask), settings.weight, anchors)}


class MaskedLanguageModelling(Objective):
    """Predict masked tokens from the rest of the text and the unmasked image.

    Inputs: the masked text with its labels, the image encoder's output; with a teacher, its
    predictions of the same tokens as soft targets. Loss: `mlm`.
    """

    has_teacher_copy: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True
    trains = frozenset({"cross_encoder"})
    settings: MLMConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.head = MLMHead(
            model.text.width, model.text.vocab_size, table_width=word_width(model.text)
        )

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the prediction head."""
        return {"mlm_head": self.head}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over masked tokens."""
        soft, alpha, teacher = None, 0.0, step.teacher
        if teacher and teacher.alpha > 0:
            alpha = teacher.alpha
            with torch.no_grad():
                head = teacher.modules["mlm_head"]
                logits, _ = self._predict(teacher.model, head, teacher.image, step)
                soft = logits.float().softmax(-1)
        logits, labels = self._predict(step.model, self.head, step.image, step)
        return {"mlm": Term(mlm_loss(logits, labels, soft, alpha), 1.0)}

    def _predict(
        self, model: VLPModel, head: nn.Module, image: ImageFeatures, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Return logits (R, vocabulary) and labels (R,) of the R masked tokens."""
        batch = step.batch
        masked = model.encode_text(batch.mlm_ids, batch.attention_mask, batch.word_mask)
        labels, slots, image_kv, query_indices = batch.mlm_labels, None, None, None
        # A GPU would have to wait for the count of masked tokens, so R is fixed there; a CPU
        # computes only the queries that are predicted.
        if on_gpu(labels):
            slots = prediction_slots(labels.numel(), self.settings.probability)
        elif step.shares_images:
            image_kv = step.image_key_values() if model is step.model else None
            query_indices, labels = masked_columns(labels)
        features = model.cross(
            image, masked, need_image=False, image_kv=image_kv, query_indices=query_indices
        )
        states, labels = masked_positions(features.text, labels, batch.valid, slots)
        return head(states, model.text_encoder.word_table), labels


class MaskedImageModelling(Objective):
    """Predict the pixels of masked patches.

    Inputs: pixels and patch mask; with output `cross` also the unmasked text, which the masked
    image then meets in the cross-modal encoder. Loss: `mim`.
    """

    in_chunks: ClassVar[bool] = True
    settings: MIMConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.head = MIMHead(model.text.width, model.image.patch_size)
        self.trains = frozenset({"cross_encoder"} if settings.output == "cross" else ())

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the prediction head with the mask token."""
        return {"mim_head": self.head}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over masked patches."""
        model, batch = step.model, step.batch

        def mask(patches: Tensor) -> Tensor:
            return self.head.mask_token(patches, batch.mim_mask)

        if self.settings.output == "image":
            states = model.image_encoder.drop_summary(model.image_encoder(batch.pixels, mask))
        else:
            features = model.cross(model.encode_image(batch.pixels, mask), step.text)
            assert features.image is not None
            states = features.image
        loss = mim_loss(self.head(states[:, 1:]), batch.pixels, batch.mim_mask, batch.valid)
        return {"mim": Term(loss, 1.0)}
