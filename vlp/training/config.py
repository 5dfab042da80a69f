"""Configuration of runs: pretraining, fine-tuning and vision-only training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from vlp.config import Choice, Config, ConfigError, LocalPath, Precision
from vlp.data.config import DataConfig
from vlp.data.limits import Limits, limits
from vlp.data.stream.batch import Inputs, PatchMasking
from vlp.data.stream.sampler import require_equal_streams, streams_of_rank
from vlp.models.config import ModelConfig
from vlp.models.towers import require_maskable
from vlp.objectives.config import ObjectivesConfig
from vlp.objectives.loss import require_whole_groups
from vlp.tasks.classification.task import ClassificationConfig
from vlp.tasks.detection.task import DetectionConfig
from vlp.tasks.downstream.registry import get_task, task_kinds
from vlp.tasks.downstream.task import TaskConfig
from vlp.tasks.grids.task import GridsConfig
from vlp.tasks.pixels.task import PixelsConfig
from vlp.tasks.widgets.task import WidgetsConfig
from vlp.training.log import TrackerName, require_trackers
from vlp.training.optimiser import OptimiserConfig


def _bool_to_name(value: Any) -> Any:
    # pydantic would read True and False as 1 and 0.
    return ("blocks" if value else "none") if isinstance(value, bool) else value


Compile = Literal["auto", "none", "blocks", "step"]


class TrainingConfig(Config):
    """Length, batch, precision, engine, checkpoints and logs of any run."""

    model_config = ConfigDict(json_schema_extra={"resume": "tolerated"})

    batch: int = Field(
        512, ge=1, description="samples of one global batch (all ranks, one micro-step)"
    )
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="micro-steps of one optimiser step; all weigh the same"
    )
    epochs: int | None = Field(
        30, ge=1, description="passes over the data; may be null where `steps` is given"
    )
    steps: int | None = Field(None, ge=1, description="optimiser steps; wins over epochs")
    precision: Precision = Field(
        "bf16",
        description="number format of forward and backward pass; parameters, gradients and "
        "optimiser state are float32, and fp16 scales the loss",
    )
    engine: str = Field(
        "deepspeed",
        description="what holds parameters and optimiser state: ddp, a whole copy on every rank; "
        "ddp-bf16, a whole copy, with gradients reduced in bf16; deepspeed, ZeRO 1; "
        "zero0 to zero3, or the path of a JSON file such as those of configs/deepspeed",
    )
    compile: Compile = Field(
        "none",
        description="torch.compile: blocks, each transformer block, of which those of a tower "
        "share one graph; step, the image, text and cross-modal encoder as one graph each; auto, "
        "blocks on a GPU and none elsewhere. Losses differ by rounding",
        json_schema_extra={"resume": "free"},
    )
    activation_checkpointing: Annotated[
        Literal["none", "blocks"] | Annotated[int, Field(ge=1)], BeforeValidator(_bool_to_name)
    ] = Field(
        "none",
        description="blocks whose activations the backward pass recomputes, to save memory: "
        "blocks, all of them; a number, the lowest ones of every encoder; losses keep every bit",
        json_schema_extra={"resume": "free"},
    )
    optimiser: OptimiserConfig = Field(
        OptimiserConfig(), description="AdamW and its learning-rate schedule"
    )
    seed: int = Field(
        0,
        ge=0,
        description="of initial weights, order of the data, augmentation and masks",
        json_schema_extra={"resume": "fixed"},
    )
    log_every: int = Field(
        50,
        ge=1,
        description="steps between two lines of the log",
        json_schema_extra={"resume": "free"},
    )
    checkpoint_every: int = Field(1000, ge=1, description="steps between two checkpoints")
    keep_last: int = Field(
        2, ge=1, description="number of checkpoints to keep", json_schema_extra={"resume": "free"}
    )
    trackers: tuple[TrackerName, ...] = Field(
        ("tensorboard",),
        description="trackers of the metrics in `log.jsonl`; wandb and mlflow need vlp[track]",
        json_schema_extra={"resume": "free"},
    )
    timeout: float = Field(
        1800.0,
        gt=0,
        description="seconds after which a rank that waits for others in a collective call fails; "
        "longer than data.outages.seconds",
        json_schema_extra={"resume": "free"},
    )

    @model_validator(mode="after")
    def _require_consistent(self) -> TrainingConfig:
        if self.epochs is None and self.steps is None:
            raise ValueError("one of epochs and steps must be a number")
        require_trackers(self.trackers)
        return self

    @property
    def deepspeed(self) -> str | None:
        """Return name or path of DeepSpeed's JSON file (`deepspeed_file`); None for DDP."""
        if self.engine in ("ddp", "ddp-bf16"):
            return None
        return "zero1" if self.engine == "deepspeed" else self.engine

    def count_steps(self, batches: int, done: int = 0) -> int:
        """Return `done` optimiser steps plus the complete ones in `batches` more; at least 1."""
        return max(1, done + batches // self.gradient_accumulation_steps)

    def require_equal_shares(self, world_size: int) -> None:
        """Require a batch that is a multiple of the number of ranks."""
        if self.batch % world_size:
            raise ConfigError(
                f"training.batch {self.batch} cannot be shared equally by {world_size} ranks"
            )


class ValidatedTrainingConfig(TrainingConfig):
    """A training that saves the model with the best validation metrics in `best/`."""

    evaluate_every: int | None = Field(
        None, ge=1, description="steps between validations; null: every epoch"
    )


class PretrainTrainingConfig(ValidatedTrainingConfig):
    """A pretraining, validated at intervals where the run has validation data."""

    grad_cache: int | None = Field(
        None,
        ge=1,
        description="GradCache: samples of a rank in one pass of encoders and objectives, a "
        "multiple of sample groups; the backward pass repeats each pass, and the contrastive loss "
        "compares the whole batch; null: one pass for all",
    )


def _output(folder: str) -> Any:
    return Field(folder, description="folder of this run", json_schema_extra={"resume": "free"})


class RunConfig(Config):
    """Settings of every run; saved resolved as `config.yaml` in `output`."""

    output: LocalPath = _output("runs/run")
    training: TrainingConfig = Field(
        TrainingConfig(), description="length, batch, optimiser, checkpoints and logs"
    )
    limits: Limits = Field(
        default_factory=limits,
        description="limits beyond which a sample is refused and counted as bad; commands without "
        "a configuration read the variable `VLP_LIMITS`, as `{pixels: 2e8}`",
        json_schema_extra={"resume": "tolerated"},
    )
    plugins: tuple[str, ...] = Field(
        (),
        description="Python files or modules that register encodings, objectives or tasks; "
        "imported before other keys are validated",
        json_schema_extra={"resume": "free"},
    )


class ValidationConfig(Config):
    """Held-out pairs that validate a pretraining; they never change its weights."""

    model_config = ConfigDict(json_schema_extra={"resume": "free"})

    shards: tuple[str, ...] = Field(min_length=1, description="folders of shards, as one set")
    features: str | None = Field(
        None, description="folder of `vlp data features` for these shards, as data.features"
    )
    rerank: int = Field(
        0, ge=0, description="candidates that the cross-modal encoder re-ranks; 0: none"
    )


# Share of patches that MIM masks, and side of a masked square in patches; SimMIM: 0.6 and 32 px.
MASKED_SHARE, MASKED_SQUARE = 0.6, 2


class PretrainConfig(RunConfig):
    """Configuration of a pretraining."""

    output: LocalPath = _output("runs/pretrain")
    init_from: str | None = Field(
        None,
        description="model folder or hub name whose weights the run starts from, in place of "
        "public weights; encodings, token projections and a token score that it lacks keep their "
        "initialisation",
        json_schema_extra={"resume": "path"},
    )
    model: ModelConfig = Field(ModelConfig(), description="sizes of the encoders, and ACE-RPE")
    data: DataConfig = Field(description="shards, their order and preparation")
    objectives: ObjectivesConfig = Field(
        ObjectivesConfig(), description="objectives and their weights"
    )
    validation: ValidationConfig | None = Field(
        None,
        description="held-out pairs; null: the run is not validated, and has no `best/`",
        json_schema_extra={"resume": "free"},
    )
    training: PretrainTrainingConfig = Field(
        PretrainTrainingConfig(),
        description="length, batch, optimiser, validation, checkpoints and logs",
    )

    @property
    def inputs(self) -> Inputs:
        """Return the sizes and maskings of the inputs of model and objectives."""
        mlm, mim = self.objectives.mlm, self.objectives.mim
        return Inputs(
            image_size=self.model.image.image_size,
            grid=self.model.image.grid,
            max_tokens=self.model.text.max_tokens,
            vocab_size=self.model.text.vocab_size,
            word_masking=mlm.probability if mlm else None,
            patch_masking=PatchMasking(MASKED_SHARE, MASKED_SQUARE) if mim else None,
            statistics=self.model.image.statistics,
        )

    def require_world_size(self, world_size: int) -> None:
        """Require equal shares of batch and streams, and whole sample groups, on all ranks."""
        try:
            self._require_world_size(world_size)
        except ConfigError as error:
            sizes = self.world_sizes()
            smaller = [size for size in sizes if size < world_size]
            larger = [size for size in sizes if size > world_size]
            nearest = " or ".join(map(str, [*smaller[-1:], *larger[:1]]))
            raise ConfigError(f"{error}; {nearest or 'no number'} can") from error

    def _require_world_size(self, world_size: int) -> None:
        batch, chunk = self.training.batch, self.training.grad_cache
        self.training.require_equal_shares(world_size)
        require_whole_groups(self.objectives, batch, world_size, chunk=chunk)
        if self.data.epoch_samples is None:  # a resampled stream suits any number of ranks
            streams_of_rank(self.data.canonical_streams, 0, world_size)

    def world_sizes(self) -> list[int]:
        """Return all numbers of ranks that can train this configuration, in ascending order."""
        sizes, batch = [], self.training.batch
        # Other numbers than divisors of the batch cannot, and an error for each takes time.
        for world_size in (number for number in range(1, batch + 1) if batch % number == 0):
            with suppress(ConfigError):
                self._require_world_size(world_size)
                sizes.append(world_size)
        return sizes

    @model_validator(mode="after")
    def _require_consistent(self) -> PretrainConfig:
        mim = self.objectives.mim
        if mim and mim.output == "cross" and self.model.cross.layout != "ace":
            raise ValueError("objectives.mim.output=cross needs model.cross.layout=ace")
        if mim and self.data.features is not None:
            raise ValueError(
                "objectives.mim regresses pixels, and data.features holds none; set "
                "objectives.mim=null or data.features=null"
            )
        if mim:
            require_maskable(self.model.image)
        if self.validation is None and self.training.evaluate_every is not None:
            raise ValueError("training.evaluate_every needs the held-out pairs of `validation`")
        has_match_score = self.objectives.itm or self.init_from
        if self.validation and self.validation.rerank and not has_match_score:
            raise ValueError("validation.rerank needs ITM scores: set objectives.itm or init_from")
        require_equal_streams(self.training.batch, self.data.canonical_streams)
        return self


AnyTask = ClassificationConfig | DetectionConfig | GridsConfig | PixelsConfig | WidgetsConfig


class VisionConfig(RunConfig):
    """Configuration of a vision-only training; `task.kind` selects the task."""

    output: LocalPath = _output("runs/vision")
    task: Annotated[AnyTask, Field(discriminator="kind")] = Field(
        description="task, selected by its `kind`"
    )


class FinetuneTrainingConfig(ValidatedTrainingConfig):
    """A fine-tuning, by default on DDP."""

    engine: str = Field(
        "ddp", description=ValidatedTrainingConfig.model_fields["engine"].description
    )
    metric: str | None = Field(
        None,
        description="metric that decides which model is the best, of `loss/...` the lowest value, "
        "of others the highest; null: the task's own",
    )
    patience: int | None = Field(
        None, ge=1, description="validations without a better result after which the run ends"
    )


class FinetuneConfig(RunConfig):
    """Configuration of a fine-tuning; `task.kind` selects the task."""

    output: LocalPath = _output("runs/finetune")
    init_from: str = Field(
        description="model folder or hub name that the run starts from",
        json_schema_extra={"resume": "path"},
    )
    model: Mapping[str, Any] = Field(
        {}, description="changes to the configuration of `init_from`, as {image: {image_size: 384}}"
    )
    task: Annotated[TaskConfig, Choice("kind", task_kinds, lambda kind: get_task(kind).config)] = (
        Field(description="of one of the kinds that `vlp.tasks.downstream.registry` knows")
    )
    training: FinetuneTrainingConfig = Field(
        FinetuneTrainingConfig(),
        description="length, batch, optimiser, validation, checkpoints and logs",
    )
