"""The pretraining task: named passes that share encoder outputs, and the losses on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from vlp.config import ConfigError
from vlp.data.image.transforms import Preprocessing
from vlp.data.stream.batch import Batch
from vlp.data.text.tokenizer import TextProcessor
from vlp.data.text.word_boxes import OTHER, OWN
from vlp.distributed import gather, global_sum
from vlp.layers.scale import LearnedScale
from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import PairIndices
from vlp.models.features import ImageFeatures, TextFeatures
from vlp.models.folder import save_pretrained, start_from
from vlp.models.pretrained.load import load_public_weights
from vlp.models.vlp import VLPModel
from vlp.objectives.anchor import paper_anchor_loss
from vlp.objectives.config import ObjectivesConfig
from vlp.objectives.contrastive.itc import itc_loss, positives, soft_targets
from vlp.objectives.contrastive.momentum_teacher import Teacher, soft_target_share
from vlp.objectives.contrastive.queue import KeyQueue
from vlp.objectives.itm import hard_negatives, itm_loss
from vlp.objectives.loss import Loss, normalise
from vlp.objectives.mim import MIMHead, mim_loss
from vlp.objectives.mlm import MLMHead, masked_positions, mlm_loss
from vlp.objectives.monitors.anchor_statistics import anchor_statistics
from vlp.objectives.monitors.collapse import feature_spread, token_cosine
from vlp.objectives.running_quantile import similarity_quantile
from vlp.objectives.token.phrase_term import phrase_loss
from vlp.objectives.token.token_term import token_losses
from vlp.positions.anchor_field import AnchorField
from vlp.tasks.task import StepOutput

HEADS = ("mlm_head.", "mim_head.")


class Keys(NamedTuple):
    """Contrastive keys of all ranks: image and text (K, d), image_ids (K,), valid (K,) bool."""

    image: Tensor
    text: Tensor
    image_ids: Tensor
    valid: Tensor


class Clean(NamedTuple):
    """What the clean pass gives to the others."""

    image: ImageFeatures
    text: TextFeatures


class Pretraining(nn.Module):
    """The VLP model with its heads; `forward` gives the losses of one rank's share of a batch.

    Passes, run when their objective is configured: `clean` (both encoders), `teacher` (momentum
    features, no gradient), `pairs` (matching pairs and hard negatives through the cross-modal
    encoder), `words` (masked text with the clean image), `patches` (masked image). Losses are
    scaled so that their mean over ranks is the mean over the global batch.

    The teacher and its queue are no part of the module's parameters: `extra_state` has them.

    Args:
        config: sizes; public weights that it names are loaded.
        objectives: what is trained.
        vocabulary: tokenizer that goes into the model folder.
        precision: "bf16" runs the passes under autocast, "float32" does not.
        log_every: steps between the statistics that cost time.
        start: model folder whose weights come last, over public ones.
        model: of this configuration, taken as it is in place of a new one.

    Raises:
        ConfigError: weights that the configuration names are missing or do not fit.
    """

    def __init__(
        self,
        config: ModelConfig,
        objectives: ObjectivesConfig,
        vocabulary: str,
        precision: str = "float32",
        log_every: int = 50,
        start: str | None = None,
        model: VLPModel | None = None,
    ) -> None:
        super().__init__()
        self.config, self.objectives, self.vocabulary = config, objectives, vocabulary
        self.precision, self.log_every = precision, log_every
        self.model = VLPModel(config) if model is None else model
        try:
            self.weight_reports = [] if model else load_public_weights(self.model)
            if start is not None:
                self.weight_reports.append(start_from(self.model, start))
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(str(error)) from error
        width = config.text.width
        contrastive = objectives.contrastive
        if contrastive and contrastive.has_token_term:
            self.token_scale = LearnedScale(contrastive.token.scale)
        if objectives.mlm:
            self.mlm_head = MLMHead(width, config.text.vocab_size)
        if objectives.mim:
            self.mim_head = MIMHead(width, config.image.patch_size)
        self.teacher: Teacher[nn.ModuleDict] | None = None
        self.queue = KeyQueue(0, config.embed_dim)
        if objectives.teacher:
            copied: dict[str, nn.Module] = {"model": self.model}
            if objectives.mlm:
                copied["mlm_head"] = self.mlm_head
            self.teacher = Teacher(nn.ModuleDict(copied))
            self.queue = KeyQueue(objectives.teacher.queue, config.embed_dim)
        self._new_keys: list[Keys] = []
        self._keys_step = 0

    def forward(self, batch: Batch, step: int) -> StepOutput:
        """Losses and statistics of a batch; `step` counts optimiser steps from 0."""
        mixed = self.precision == "bf16"
        with torch.autocast(batch.pixels.device.type, torch.bfloat16, enabled=mixed):
            return self._forward(batch, step)

    def _forward(self, batch: Batch, step: int) -> StepOutput:
        objectives = self.objectives
        losses: dict[str, Loss] = {}
        weights: dict[str, float] = {}
        statistics: dict[str, Tensor] = {}
        with record_function("pass/clean"):
            clean = Clean(
                self.model.encode_image(batch.pixels),
                self.model.encode_text(batch.text_ids, batch.attention_mask, batch.word_mask),
            )
        alpha = 0.0
        taught = None
        if self.teacher is not None and objectives.teacher is not None:
            alpha = soft_target_share(
                step, objectives.teacher.alpha, objectives.teacher.warmup_steps
            )
            with record_function("pass/teacher"):
                taught = self._teach(batch, alpha, step)

        if objectives.contrastive:
            with record_function("pass/contrastive"):
                losses |= self._contrastive(batch, clean, taught, alpha)
            pair_weight = objectives.contrastive.weight
            weights |= {
                "contrastive": pair_weight,
                "token": pair_weight * objectives.contrastive.token.weight,
                "word": pair_weight * objectives.contrastive.token.words,
                "phrase": pair_weight * objectives.contrastive.token.phrases,
            }
        if objectives.itm:
            with record_function("pass/pairs"):
                losses["itm"], anchors = self._match(batch, clean, statistics)
            weights["itm"] = objectives.itm.weight
        else:
            with torch.no_grad():
                anchors = self.model.anchors(clean.image, clean.text)
        if anchors is not None and "anchor" in self.config.cross.position:
            with record_function("pass/anchor_statistics"):
                self._watch_anchors(batch, anchors, step, statistics)
        del anchors  # similarities of all pairs, which nothing below needs
        if objectives.mlm:
            with record_function("pass/words"):
                losses["mlm"] = self._masked_words(batch, clean, taught, alpha)
            weights["mlm"] = objectives.mlm.weight
        if objectives.mim:
            with record_function("pass/patches"):
                losses["mim"] = self._masked_patches(batch, clean)
            weights["mim"] = objectives.mim.weight

        scaled = normalise(losses)
        total = torch.stack([weights[name] * loss for name, loss in scaled.items()]).sum()
        if self._is_logged(step):
            statistics |= self._collapse(batch, clean)
            if batch.word_patches is not None:
                statistics |= self._watch_words(batch, clean)
        return StepOutput(total, {name: loss.detach() for name, loss in scaled.items()}, statistics)

    # -- contrastive ------------------------------------------------------------------------------

    def _contrastive(
        self, batch: Batch, clean: Clean, taught: Taught | None, alpha: float
    ) -> dict[str, Loss]:
        settings = self.objectives.contrastive
        assert settings is not None
        image, text = clean.image.feature, clean.text.feature
        if taught is None:
            keys = Keys(gather(image), gather(text), gather(batch.image_ids), gather(batch.valid))
        else:
            keys = taught.candidates
        positive = positives(batch.image_ids, keys.image_ids)
        if settings.is_paper_form:
            return {
                "contrastive": paper_anchor_loss(
                    image,
                    text,
                    keys.image,
                    keys.text,
                    positive,
                    clean.image.tokens,
                    clean.text.tokens,
                    batch.word_mask,
                    settings.scale,
                    settings.margin,
                    batch.valid,
                    keys.valid,
                )
            }
        losses = {
            "contrastive": itc_loss(
                image,
                text,
                keys.image,
                keys.text,
                positive,
                self.model.temperature(),
                batch.valid,
                keys.valid,
                None if taught is None else taught.soft_pairs,
                alpha,
            )
        }
        if settings.has_token_term:
            losses["token"], losses["word"] = token_losses(
                clean.image.tokens,
                clean.text.tokens,
                batch.word_mask,
                batch.text_ids,
                batch.image_ids,
                batch.valid,
                self.token_scale(),
                settings.token.alpha,
                settings.token.beta,
                settings.token.group,
            )
            if settings.token.phrases:
                losses["phrase"] = phrase_loss(
                    clean.image.tokens, clean.text.tokens, batch.word_mask, batch.valid
                )
        return losses

    # -- teacher ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _teach(self, batch: Batch, alpha: float, step: int) -> Taught:
        """Keys, soft targets and word predictions of the momentum teacher."""
        assert self.teacher is not None
        self.teacher.to(batch.pixels.device)
        self.queue.to(batch.pixels.device)
        model: VLPModel = self.teacher.module["model"]  # type: ignore[assignment]
        image = model.encode_image(batch.pixels)
        text = model.encode_text(batch.text_ids, batch.attention_mask, batch.word_mask)
        fresh = Keys(
            gather(image.feature),
            gather(text.feature),
            gather(batch.image_ids),
            gather(batch.valid),
        )
        if step != self._keys_step:  # keys of a step that was skipped are not pushed
            self._new_keys.clear()
        if self.training:
            self._keys_step = step
            self._new_keys.append(fresh)
        past = self.queue.keys()
        candidates = Keys(
            torch.cat([fresh.image, past.image]),
            torch.cat([fresh.text, past.text]),
            torch.cat([fresh.image_ids, past.image_ids]),
            torch.cat([fresh.valid, fresh.valid.new_ones(len(past.image_ids))]),
        )
        soft_pairs = soft_words = None
        contrastive = self.objectives.contrastive
        if alpha > 0 and contrastive and not contrastive.is_paper_form:
            soft_pairs = soft_targets(
                image.feature,
                text.feature,
                candidates.image,
                candidates.text,
                self._pair_temperature(),
                candidates.valid,
            )
        if alpha > 0 and self.objectives.mlm:
            masked = model.encode_text(batch.mlm_ids, batch.attention_mask, batch.word_mask)
            crossed = model.cross(image, masked, need_image=False)
            states, _ = masked_positions(crossed.text, batch.mlm_labels, batch.valid)
            head = self.teacher.module["mlm_head"]
            soft_words = head(states, model.text_encoder.embedding.word.weight).float().softmax(-1)
        return Taught(candidates, soft_pairs, soft_words)

    def after_step(self, parameters: Callable[[], dict[str, Tensor]]) -> None:
        """Move the teacher towards the new student and push its keys into the queue."""
        if self.teacher is not None and self.objectives.teacher is not None:
            self.teacher.update(
                parameters(), self.objectives.teacher.momentum, dict(self.named_buffers())
            )
            for keys in self._new_keys:
                self.queue.push(keys.image, keys.text, keys.image_ids, keys.valid)
        self._new_keys.clear()

    def after_skip(self) -> None:
        """Forget the teacher's keys of a step that was not applied."""
        self._new_keys.clear()

    # -- cross-modal passes -----------------------------------------------------------------------

    def _match(
        self, batch: Batch, clean: Clean, statistics: dict[str, Tensor]
    ) -> tuple[Loss, AnchorField | None]:
        """Matching pairs, each image with a wrong text, and each text with a wrong image."""
        settings = self.objectives.itm
        assert settings is not None
        with torch.no_grad(), torch.autocast(batch.pixels.device.type, enabled=False):
            similarity = clean.image.feature @ clean.text.feature.T / self._pair_temperature()
        negatives = hard_negatives(
            similarity, batch.image_ids, batch.valid, batch.uniform, settings.group
        )
        rows = torch.arange(len(batch.valid), device=batch.valid.device)
        pairs = PairIndices(
            texts=torch.cat([rows, negatives.text_for_image, rows]),
            images=torch.cat([rows, rows, negatives.image_for_text]),
        )
        crossed = self.model.cross(clean.image, clean.text, pairs, need_image=False)
        logits = self.model.match_logits(crossed)
        labels = torch.cat([torch.ones_like(rows), torch.zeros_like(rows), torch.zeros_like(rows)])
        counted = torch.cat([batch.valid, negatives.has_text, negatives.has_image])
        right = (logits.detach().argmax(-1) == labels) & counted
        statistics["itm_accuracy"] = right.sum() / counted.sum().clamp(min=1)
        anchors = crossed.anchors
        if anchors is not None:
            anchors = AnchorField(*(field[: len(rows)].detach() for field in anchors))
        return itm_loss(logits, labels, counted), anchors

    def _masked_words(
        self, batch: Batch, clean: Clean, taught: Taught | None, alpha: float
    ) -> Loss:
        masked = self.model.encode_text(batch.mlm_ids, batch.attention_mask, batch.word_mask)
        crossed = self.model.cross(clean.image, masked, need_image=False)
        states, labels = masked_positions(crossed.text, batch.mlm_labels, batch.valid)
        logits = self.mlm_head(states, self.model.text_encoder.embedding.word.weight)
        return mlm_loss(logits, labels, None if taught is None else taught.soft_words, alpha)

    def _masked_patches(self, batch: Batch, clean: Clean) -> Loss:
        def hide(patches: Tensor) -> Tensor:
            return self.mim_head.mask_token(patches, batch.mim_mask)

        assert self.objectives.mim is not None
        if self.objectives.mim.output == "image":
            states = self.model.image_encoder(batch.pixels, hide)
        else:
            crossed = self.model.cross(self.model.encode_image(batch.pixels, hide), clean.text)
            assert crossed.image is not None
            states = crossed.image
        return mim_loss(self.mim_head(states[:, 1:]), batch.pixels, batch.mim_mask, batch.valid)

    def _pair_temperature(self) -> Tensor | float:
        """Temperature of pair similarities; 1 / lambda where the loss has none of its own."""
        contrastive = self.objectives.contrastive
        if contrastive and contrastive.is_paper_form:
            return 1 / contrastive.scale
        return self.model.temperature().detach()

    # -- statistics -------------------------------------------------------------------------------

    def _is_logged(self, step: int) -> bool:
        """Statistics that cost time are computed where a log line is due, and at the start."""
        return step == 0 or (step + 1) % self.log_every == 0

    def _watch_anchors(
        self, batch: Batch, anchors: AnchorField, step: int, statistics: dict[str, Tensor]
    ) -> None:
        """Move the running threshold, and log how selective anchors are."""
        settings = self.config.cross.anchor
        threshold = self.model.anchor_threshold
        if self._is_logged(step):
            shares = anchor_statistics(
                anchors.similarity,
                threshold.clamp(min=1e-3),
                anchors.path[:, 1:],
                anchors.reachable,
                batch.word_mask,
                batch.valid,
            )
            for name, groups in zip(shares._fields, shares):
                statistics[f"anchor_{name}"] = groups.mean()
                statistics |= {f"anchor_{name}/{g}": groups[g] for g in range(len(groups))}
            statistics["anchor_threshold"] = threshold.clone()
        if settings.threshold is None and self.training:
            now = similarity_quantile(
                anchors.similarity, batch.word_mask, batch.valid, settings.quantile
            )
            started = threshold > 0
            moved = torch.lerp(now, threshold, settings.quantile_momentum)
            new = torch.where(started, moved, now)
            threshold.copy_(torch.where(torch.isfinite(new), new, threshold))

    def _collapse(self, batch: Batch, clean: Clean) -> dict[str, Tensor]:
        contrastive = self.objectives.contrastive
        statistics = {
            "image_token_cosine": token_cosine(clean.image.tokens, valid=batch.valid),
            "text_token_cosine": token_cosine(clean.text.tokens, batch.word_mask, batch.valid),
            "image_spread": feature_spread(clean.image.feature, batch.valid),
            "text_spread": feature_spread(clean.text.feature, batch.valid),
        }
        statistics["temperature"] = self.model.temperature().detach()
        if contrastive and contrastive.has_token_term:
            statistics["token_scale"] = self.token_scale().detach()
        return statistics

    @torch.no_grad()
    def _watch_words(self, batch: Batch, clean: Clean) -> dict[str, Tensor]:
        """Cosine of a word with its own object's patches, and with other objects' (scenes only)."""
        assert batch.word_patches is not None
        with torch.autocast(batch.pixels.device.type, enabled=False):
            cosine = clean.text.tokens @ clean.image.tokens.transpose(1, 2)  # (B, N, M)
        shown = torch.stack([batch.word_patches == which for which in (OWN, OTHER)])
        sums = global_sum((cosine * shown).sum((1, 2, 3)))
        counts = global_sum(shown.sum((1, 2, 3)))
        own, other = sums / counts.clamp(min=1)
        return {"word_own_box": own, "word_other_box": other}

    # -- state ------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Tensor]:
        """Teacher and queue by name, the same on every rank; empty without a teacher."""
        if self.teacher is None:
            return {}
        state = {f"teacher.{name}": value for name, value in self.teacher.state_dict().items()}
        return state | {f"queue.{name}": value for name, value in self.queue.state_dict().items()}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `extra_state` gave."""
        if self.teacher is None:
            return
        self.teacher.load_state_dict(_part(state, "teacher."))
        self.queue.load_state_dict(_part(state, "queue."))

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the model folder; `state` is the full `state_dict` of this task."""
        save_pretrained(
            folder,
            self.config,
            _part(state, "model."),
            TextProcessor.load(self.vocabulary, self.config.text.max_tokens),
            Preprocessing(self.config.image.image_size),
            {name: value for name, value in state.items() if name.startswith(HEADS)},
        )


class Taught(NamedTuple):
    """The teacher's candidates, its soft targets for pairs, and for masked words."""

    candidates: Keys
    soft_pairs: tuple[Tensor, Tensor] | None
    soft_words: Tensor | None


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
