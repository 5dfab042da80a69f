"""The pretraining task: encoders, teacher, objectives, and the total loss of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from vlp.compilation import on_gpu
from vlp.data.image.transforms import Preprocessing
from vlp.data.stream.batch import Batch
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.folder import load_start, save_pretrained
from vlp.models.lora import add_lora
from vlp.models.vlp import VLPModel
from vlp.objectives.config import ObjectivesConfig
from vlp.positions.anchor_field import AnchorPaths
from vlp.tasks.pretraining.grad_cache import (
    checkpoint_activations,
    chunk_slices,
    concatenate,
    run_in_chunks,
    select_rows,
)
from vlp.tasks.pretraining.heads import start_heads, start_mlm_head
from vlp.tasks.pretraining.objectives import OBJECTIVES, Objective, Step, Term
from vlp.tasks.pretraining.statistics import step_statistics, update_threshold
from vlp.tasks.task import AUTOCAST, Precision, StepOutput, Task, strip_prefix
from vlp.tasks.teacher import MomentumTeacher


class Pretraining(Task):
    """The VLP model with the configured objectives; `forward` takes a rank's rows of a batch.

    Args:
        config: sizes of a new model, and its public weights.
        objectives: settings of the objectives and of the teacher.
        vocabulary: folder or hub name of the tokenizer that `save_model` writes.
        log_every: steps between costly statistics.
        init_from: model folder with the weights of model and heads; then public weights are not
            read, except for an MLM head that the folder lacks.
        model: trained in place of a new one; then `config` and public weights are not read.
        grad_cache: rows of a chunk (`grad_cache.py`); None runs all rows at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        objectives: ObjectivesConfig,
        vocabulary: str,
        precision: Precision = "float32",
        log_every: int = 50,
        init_from: str | None = None,
        model: VLPModel | None = None,
        grad_cache: int | None = None,
    ) -> None:
        super().__init__(precision)
        self.model = VLPModel(config) if model is None else model
        self.config = config = self.model.config
        self.vocabulary, self.log_every, self.grad_cache = vocabulary, log_every, grad_cache
        self.weight_reports = load_start(self.model, init_from, public=model is None)
        if model is None:
            add_lora(self.model)
        self.objectives: dict[str, Objective] = {}
        for name, objective_class in OBJECTIVES.items():
            if (settings := objective_class.settings_of(name, objectives)) is not None:
                self.objectives[name] = objective_class(settings, objectives, config)
                for module_name, module in self.objectives[name].modules().items():
                    self.add_module(module_name, module)
        trained_parts = [objective.trains for objective in self.objectives.values()]
        self.model.freeze_modules(Objective.trains.difference(*trained_parts))
        heads = self._saved_heads()
        head_reports = [] if init_from is None else start_heads(heads, init_from)
        from_folder = {name for report in head_reports for name in report.matched}
        # A folder that was trained without MLM has no MLM head.
        if model is None and config.text.weights and "mlm_head.bias" not in from_folder:
            self.weight_reports += start_mlm_head(heads, config.text.weights)
        self.weight_reports += head_reports
        self.teacher: MomentumTeacher | None = None
        if objectives.teacher:
            student: dict[str, nn.Module] = {"model": self.model}
            for objective in self.objectives.values():
                student |= objective.modules() if objective.has_teacher_copy else {}
            dtype = AUTOCAST.get(precision)
            self.teacher = MomentumTeacher(objectives.teacher, student, config.embed_dim, dtype)

    def forward(self, batch: Batch, step: int) -> StepOutput:
        """Compute losses and statistics of a batch; `step` counts optimiser steps from 0."""
        # Cut texts to the rank's longest, which changes only rounding unless an encoding reads
        # padding. On a GPU, reading that length would stall the stream.
        if not (on_gpu(batch.text_ids) or self.is_compiled or self.config.cross.reads_padding):
            batch = batch.without_padding()
        with self.autocast(batch.pixels.device):
            step_inputs = self._encode(batch, step)
            terms, paths = self._run_objectives(step_inputs, on_unmasked_pairs=True)
            paths = self._matching_paths(step_inputs, paths)
            if step_inputs.is_logged:
                step_inputs.statistics |= step_statistics(step_inputs, paths)
            if paths is not None:
                self._update_threshold(step_inputs.batch, paths)
            del paths  # frees memory: the other objectives do not read them
            terms |= self._run_objectives(step_inputs, on_unmasked_pairs=False)[0]
            return self.step_output(
                {name: term.loss for name, term in terms.items()},
                {name: term.weight for name, term in terms.items()},
                step_inputs.statistics,
            )

    def _encode(self, batch: Batch, step: int) -> Step:
        """Run the teacher and both encoders on the unmasked batch."""
        teacher_output = None
        encoder = self.model.image_encoder
        # Run a frozen tower once for student and teacher; stored features (B, T, width) skip it.
        if encoder.frozen and batch.pixels.ndim == 4:
            with record_function("pass/clean"):
                average_hflip = encoder.config.average_hflip and not self.training
                tower = encoder.hflip_averaged_tower if average_hflip else encoder.tower
                batch = batch._replace(pixels=tower(batch.pixels))
        if self.teacher is not None:
            with record_function("pass/teacher"):
                finish_teacher = self.teacher.start(batch, step, self.training)
        with record_function("pass/clean"):
            image, text = self._features(batch)
        if self.teacher is not None:
            with record_function("pass/teacher"):
                teacher_output = finish_teacher()  # its keys were gathered meanwhile
        is_logged = step == 0 or (step + 1) % self.log_every == 0
        # A compiled pass needs static shapes, however many words are masked.
        cross_encoder = self.model.cross_encoder
        shares_images = not self.is_compiled and cross_encoder.shares_images(image.states)
        return Step(
            index=step,
            batch=batch,
            model=self.model,
            image=image,
            text=text,
            teacher=teacher_output,
            is_logged=is_logged,
            shares_images=shares_images,
        )

    def _features(self, batch: Batch) -> tuple[ImageFeatures, TextFeatures]:
        def encode(chunk: Batch) -> tuple[ImageFeatures, TextFeatures]:
            text = chunk.text_ids, chunk.attention_mask, chunk.word_mask
            return self.model.encode_image(chunk.pixels), self.model.encode_text(*text)

        if self.grad_cache is None:
            return encode(batch)
        slices = chunk_slices(len(batch.valid), self.grad_cache)
        chunks = [select_rows(batch, rows) for rows in slices]
        features = (checkpoint_activations(partial(encode, chunk)) for chunk in chunks)
        images, texts = zip(*features, strict=True)
        return concatenate(images), concatenate(texts)

    def _run_objectives(
        self, step: Step, on_unmasked_pairs: bool
    ) -> tuple[dict[str, Term], AnchorPaths | None]:
        """Run the objectives on unmasked pairs, or the others; return their terms and paths."""
        terms: dict[str, Term] = {}
        for name, objective in self.objectives.items():
            if objective.on_unmasked_pairs == on_unmasked_pairs:
                with record_function(f"pass/{name}"):
                    if self.grad_cache is not None and objective.can_chunk:
                        terms |= run_in_chunks(objective, step, self.grad_cache)
                    else:
                        terms |= objective(step)
        paths = next((term.paths for term in terms.values() if term.paths), None)
        return {name: term._replace(paths=None) for name, term in terms.items()}, paths

    @torch.no_grad()
    def _matching_paths(self, step: Step, paths: AnchorPaths | None) -> AnchorPaths | None:
        """Return the paths of the matching pairs, computed here if no objective returned them.

        None without anchor encoding.
        """
        if "anchor" not in self.config.cross.position:
            return None
        return self.model.anchor_paths(step.image, step.text) if paths is None else paths

    def _update_threshold(self, batch: Batch, paths: AnchorPaths) -> None:
        """Move a running threshold towards the quantile of the matching pairs, in training."""
        options = self.model.anchor_options
        if options.threshold is None and self.training:
            with record_function("pass/anchor_threshold"):
                update_threshold(
                    self.model.anchor_threshold,
                    paths.similarity,
                    batch.word_mask,
                    batch.valid,
                    options.quantile,
                    options.quantile_momentum,
                )

    @property
    def static_shapes(self) -> bool:
        """Return False with text length groups: each group is cut to its longest text."""
        return self.config.text.length_groups == 1

    def after_step(
        self, parameters: Callable[[], dict[str, Tensor]], applied: Tensor | None = None
    ) -> None:
        """Update the teacher and its queue of keys, unless `applied` (0-d) is False."""
        if self.teacher is not None:
            self.teacher.after_step(parameters(), dict(self.named_buffers()), applied)

    def teachers(self) -> list[nn.Module]:
        """Return the momentum teacher's module, if there is a teacher."""
        return [] if self.teacher is None else [self.teacher.average.module]

    def after_skip(self) -> None:
        """Drop the teacher's keys of a step that was not applied."""
        if self.teacher is not None:
            self.teacher.forget()

    def extra_state(self) -> dict[str, Tensor]:
        """Return teacher and queue by name; empty without a teacher."""
        return {} if self.teacher is None else self.teacher.state_dict()

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `extra_state`; ignore it without a teacher."""
        if self.teacher is not None:
            self.teacher.load_state_dict(state)

    def _saved_heads(self) -> dict[str, nn.Module]:
        """Return the objectives' modules that go into the model folder, by name."""
        heads: dict[str, nn.Module] = {}
        for objective in self.objectives.values():
            heads |= objective.modules() if objective.saves_modules else {}
        return heads

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the model folder; `state` is the full `state_dict` of this task."""
        prefixes = tuple(f"{name}." for name in self._saved_heads())
        save_pretrained(
            folder,
            self.config,
            strip_prefix(state, "model."),
            TextProcessor.load(self.vocabulary, self.config.text.max_tokens),
            Preprocessing(self.config.image.image_size, *self.config.image.statistics),
            {name: value for name, value in state.items() if name.startswith(prefixes)},
        )
