"""Pretraining objectives: interface, registry, contrastive, sigmoid, token terms, ITM, MLM, MIM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vlp.compilation import on_gpu
from vlp.config import Config
from vlp.data.stream.batch import Batch
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
    match_keys,
    sigmoid_loss,
    soft_targets,
)
from vlp.objectives.itm import hard_negatives, itm_loss, listwise_itm_loss
from vlp.objectives.loss import Loss
from vlp.objectives.mim import MIMHead, mim_loss
from vlp.objectives.mlm import MLMHead, masked_columns, masked_token_bound, mlm_loss, select_masked
from vlp.objectives.token import phrase_loss, token_losses
from vlp.positions.anchor_field import AnchorPaths
from vlp.tasks.teacher import TeacherOutput, gather_keys

# Names of the model's token projections.
TOKEN_PROJECTIONS = frozenset({"image_tokens", "text_tokens"})


@dataclass
class Step:
    """Inputs of all objectives in one forward pass, and the statistics for the log."""

    # Index of the optimiser step, from 0; for objectives of plugins.
    index: int
    batch: Batch
    model: VLPModel
    # Outputs of both encoders, and of the teacher, on the unmasked batch.
    image: ImageFeatures
    text: TextFeatures
    teacher: TeacherOutput | None
    # True if a log line is due: then costly statistics are computed.
    is_logged: bool
    statistics: dict[str, Tensor] = field(default_factory=dict)
    # Whether passes over unmasked images share `image_kv`.
    shares_images: bool = False
    # Cache of `image_key_values`.
    image_kv: ImageKeyValues | None = None

    def image_key_values(self) -> ImageKeyValues | None:
        """Return cross-attention's keys and values of unmasked images; None without sharing."""
        if self.image_kv is None and self.shares_images:
            self.image_kv = self.model.cross_encoder.image_key_values(self.image.states)
        return self.image_kv


class Term(NamedTuple):
    """One loss with its weight."""

    loss: Loss
    weight: float
    # Detached paths of the B matching pairs, if computed.
    paths: AnchorPaths | None = None


class Objective:
    """Base of the objectives; the task calls an instance in each forward pass.

    With GradCache and `can_chunk` it is called for each chunk. The task has an objective if
    `settings_of` returns settings for it.

    Args:
        settings: result of `settings_of`.
        objectives: settings of all objectives.
        model: configuration of the model.
    """

    # True if it reads unmasked pairs alone: it runs first, before `anchor_threshold` is updated.
    on_unmasked_pairs: ClassVar[bool] = False
    # True if its losses are sums over rows, or over sample groups that do not read each other: then
    # GradCache may run it on chunks.
    can_chunk: ClassVar[bool] = False
    # True if its modules go into the model folder.
    saves_modules: ClassVar[bool] = True
    # True if the momentum teacher has a copy of its modules.
    has_teacher_copy: ClassVar[bool] = False
    # Parts besides both encoders that its loss trains: cross_encoder, match_head, image_tokens,
    # text_tokens. A part that no objective trains is frozen, as weight decay would shrink it.
    trains: frozenset[str] = frozenset({"cross_encoder", "match_head"}) | TOKEN_PROJECTIONS

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        self.settings, self.objectives = settings, objectives

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> Any | None:
        """Return the settings under the key `name`; None leaves the objective out."""
        return getattr(objectives, name, None)

    def modules(self) -> Mapping[str, nn.Module]:
        """Return trainable modules, which become members of the task under these names."""
        return {}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the losses by name; statistics go into `step.statistics`."""
        raise NotImplementedError


# By name, in the order in which they run and losses are summed, `on_unmasked_pairs` ones first.
OBJECTIVES: dict[str, type[Objective]] = {}


def register_objective(
    name: str, objective: type[Objective], settings: type[Config] | None = None
) -> None:
    """Register an objective.

    Args:
        name: key of its settings in `objectives`, unless its `settings_of` reads another.
        settings: class of the settings under a new key `name`; None adds no key.
    """
    if name in OBJECTIVES:
        raise ValueError(f"an objective {name!r} is registered already")
    if settings is not None:
        register_settings(name, settings)
    OBJECTIVES[name] = objective


# Margin delta of Eq. 2 in the paper.
PAPER_MARGIN = 0.05
# Initial value of the sigmoid loss's learned bias, as in SigLIP: nearly all pairs are negatives.
SIGMOID_BIAS = -10.0
# Initial value of the learned scale of token logits.
TOKEN_SCALE = 10.0


class Contrastive(Objective):
    """Contrastive loss over the images and captions of all ranks and of the teacher's queue (ITC).

    Inputs: features of the unmasked batch; a teacher's keys and soft targets. The paper's form
    (Eqs 1-2) reads tokens instead of soft targets. Loss: `contrastive`.
    """

    on_unmasked_pairs: ClassVar[bool] = True
    settings: ContrastiveConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.trains = TOKEN_PROJECTIONS if settings.kind == "paper" else frozenset()

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> ContrastiveConfig | None:
        """Return the contrastive settings unless their kind is `sigmoid`."""
        contrastive = objectives.contrastive
        return contrastive if contrastive and contrastive.kind != "sigmoid" else None

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss, image-to-text and text-to-image."""
        settings, batch, teacher = self.settings, step.batch, step.teacher
        image, text = step.image.feature, step.text.feature
        keys = teacher.keys if teacher else gather_keys(step.image, step.text, batch)
        positive, is_linked = match_keys(batch.pair_ids, keys.pair_ids)
        # Pairs that a third pair of the batches or the queue links are no negatives. For bools, >=
        # is "positive or not linked", in one kernel.
        candidate_valid = keys.valid & (positive >= is_linked)
        if settings.kind == "paper":
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
    """Return the temperature of pair similarities, without gradient."""
    contrastive = objectives.contrastive
    if contrastive and contrastive.kind == "paper":
        return 1 / contrastive.scale  # 1 / lambda of Eq. 1, which is not learned
    return model.temperature().detach()


class SigmoidContrastive(Objective):
    """SigLIP's loss: binary classification of all pairs of the ranks' images and texts.

    Inputs: features of the unmasked batch. Cosines are divided by the model's temperature, which
    starts at 0.1 in SigLIP's paper. Loss: `contrastive`.
    """

    on_unmasked_pairs: ClassVar[bool] = True
    trains = frozenset()
    saves_modules: ClassVar[bool] = False
    settings: ContrastiveConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.bias = LearnedBias(SIGMOID_BIAS)

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> ContrastiveConfig | None:
        """Return the contrastive settings if their kind is `sigmoid`."""
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
    """Contrastive losses of tokens within sample groups; their weights multiply the objective's.

    Inputs: tokens of the unmasked batch. Losses: `token` (captions against images), `word` (words
    against images), `phrase` (a word imitates a more selective neighbour). Logs `token_scale`.
    """

    on_unmasked_pairs: ClassVar[bool] = True
    trains = TOKEN_PROJECTIONS
    saves_modules: ClassVar[bool] = False
    can_chunk: ClassVar[bool] = True
    settings: ContrastiveConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.scale = LearnedScale(TOKEN_SCALE)

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> ContrastiveConfig | None:
        """Return the contrastive settings if their form has token terms."""
        contrastive = objectives.contrastive
        return contrastive if contrastive and contrastive.kind == "anchor" else None

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the learned scale of token logits."""
        return {"token_scale": self.scale}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute `token`, a mean over captions, and `word` and `phrase`, means over words."""
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
    """Classification of matching pairs against hard negatives of each image and each text.

    Inputs: both encoders' outputs on the unmasked batch; `batch.uniform` draws the negatives.
    Loss: `itm`, binary or listwise, with anchor paths of the matching pairs. Logs `itm_accuracy`.
    """

    on_unmasked_pairs: ClassVar[bool] = True
    can_chunk: ClassVar[bool] = True
    settings: ITMConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        tokens = TOKEN_PROJECTIONS if model.cross.token_score else frozenset()
        self.trains = tokens | {"cross_encoder", "match_head"}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over matching pairs and their negatives."""
        batch, image, text = step.batch, step.image, step.text
        with torch.no_grad(), torch.autocast(batch.pixels.device.type, enabled=False):
            temperature = pair_temperature(step.model, self.objectives)
            similarity = image.feature @ text.feature.T / temperature
        settings = self.settings
        num_negatives = settings.listwise or 1  # the binary loss has one
        negatives = hard_negatives(
            similarity, batch.pair_ids, batch.valid, batch.uniform, settings.group, num_negatives
        )
        rows = torch.arange(len(batch.valid), device=batch.valid.device)
        row_of_negative = rows.repeat_interleave(num_negatives)
        pairs = PairIndices(
            texts=torch.cat([rows, negatives.text_for_image, row_of_negative]),
            images=torch.cat([rows, row_of_negative, negatives.image_for_text]),
        )
        # With pooling `cls` the head reads [CLS] (token 0) alone: where passes share images, the
        # last layer computes only this query.
        image_kv, query_indices = step.image_key_values(), None
        if image_kv is not None and step.model.config.cross.pooling == "cls":
            query_indices = torch.zeros_like(pairs.texts)[:, None]
        features = step.model.cross(
            image, text, pairs, need_image=False, image_kv=image_kv, query_indices=query_indices
        )
        logits = step.model.itm_logits(features)
        paths = features.paths
        if paths is not None:
            paths = paths.map(lambda part: part[: len(rows)].detach())
        if settings.listwise is None:
            no_match = torch.zeros_like(row_of_negative)
            labels = torch.cat([torch.ones_like(rows), no_match, no_match])
            mask = torch.cat([batch.valid, negatives.exists, negatives.exists])
            correct = (logits.detach().argmax(-1) == labels) & mask
            loss = itm_loss(logits, labels, mask)
        else:
            # Two lists a row: its image with the negative texts, its text with negative images.
            log_odds = logits[:, 1] - logits[:, 0]
            matching, not_matching = log_odds.split([len(rows), 2 * len(row_of_negative)])
            positive, negative = matching.repeat(2), not_matching.unflatten(0, (-1, num_negatives))
            # A list has all its negatives or no negative: the flag of its first one is enough.
            mask = (negatives.exists[::num_negatives] & batch.valid).repeat(2)
            correct = (positive > negative.amax(1)).detach() & mask
            loss = listwise_itm_loss(positive, negative, mask)
        step.statistics["itm_accuracy"] = correct.sum() / mask.sum().clamp(min=1)
        return {"itm": Term(loss, settings.weight, paths)}


class MaskedLanguageModelling(Objective):
    """Prediction of masked tokens from the rest of the text and the unmasked image.

    Inputs: the masked text with its labels, the image encoder's output; a teacher's predictions of
    the same tokens as soft targets. Loss: `mlm`.
    """

    has_teacher_copy: ClassVar[bool] = True
    can_chunk: ClassVar[bool] = True
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
                teacher_logits, _ = self._predict(teacher.model, head, teacher.image, step)
                soft = teacher_logits.float().softmax(-1)
        logits, labels = self._predict(step.model, self.head, step.image, step)
        return {"mlm": Term(mlm_loss(logits, labels, soft, alpha), 1.0)}

    def _predict(
        self, model: VLPModel, head: nn.Module, image: ImageFeatures, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Return logits (R, vocabulary) and labels (R,); on a GPU surplus rows have label -100."""
        batch = step.batch
        masked_text = model.encode_text(batch.mlm_ids, batch.attention_mask, batch.word_mask)
        labels, max_masked, image_kv, query_indices = batch.mlm_labels, None, None, None
        # On a GPU, reading the count of masked tokens would stall the stream, so R is fixed. On a
        # CPU, where passes share images, only the queries of masked tokens are computed.
        if on_gpu(labels):
            max_masked = masked_token_bound(labels.numel(), self.settings.probability)
        elif step.shares_images:
            # The cached keys and values are the student's, not the teacher's.
            if model is step.model:
                image_kv = step.image_key_values()
            query_indices, labels = masked_columns(labels)
        features = model.cross(
            image, masked_text, need_image=False, image_kv=image_kv, query_indices=query_indices
        )
        states, labels = select_masked(features.text, labels, batch.valid, max_masked)
        return head(states, model.text_encoder.word_table), labels


class MaskedImageModelling(Objective):
    """Prediction of the pixels of masked patches.

    Inputs: pixels and patch mask; with output `cross`, which predicts from the cross-modal
    encoder's output, also the unmasked text. Loss: `mim`.
    """

    can_chunk: ClassVar[bool] = True
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

        def apply_mask(patches: Tensor) -> Tensor:
            return self.head.mask_token(patches, batch.mim_mask)

        if self.settings.output == "image":
            output = model.image_encoder(batch.pixels, apply_mask)
            states = model.image_encoder.drop_summary_tokens(output)
        else:
            features = model.cross(model.encode_image(batch.pixels, apply_mask), step.text)
            assert features.image is not None
            states = features.image
        predicted_pixels = self.head(states[:, 1:])  # without [CLS]
        loss = mim_loss(predicted_pixels, batch.pixels, batch.mim_mask, batch.valid)
        return {"mim": Term(loss, 1.0)}


register_objective("contrastive", Contrastive)
register_objective("sigmoid", SigmoidContrastive)
register_objective("token", TokenTerms)
register_objective("itm", ImageTextMatching)
register_objective("mlm", MaskedLanguageModelling)
register_objective("mim", MaskedImageModelling)
