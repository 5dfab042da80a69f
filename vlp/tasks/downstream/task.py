"""A pretrained model with the head of one benchmark, and its model folder.

`vlp.load` reads the folder; `heads.safetensors` has the head's weights, `task.json` its kind.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from vlp.config import Config, ConfigError, merge, plugin_of, require_plugins, validate
from vlp.data.downstream.dataset import DownstreamDataConfig, DownstreamDataset, ImagePreparation
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.text.tokenizer import TextProcessor
from vlp.io import parse_json, write_json
from vlp.models.config import ModelConfig
from vlp.models.decoder import (
    AnswerDecoder,
    AnswerDecoderConfig,
    Memory,
    SpecialIds,
    answer_likelihood,
    generate,
    start_decoder,
)
from vlp.models.folder import (
    Loaded,
    from_pretrained,
    plain_config,
    read_heads,
    require_sizes,
    save_pretrained,
    start_from,
)
from vlp.models.lora import add_lora
from vlp.models.pretrained.load import LoadReport
from vlp.models.pretrained.local_copy import CONFIG, local_folder
from vlp.models.vlp import VLPModel
from vlp.objectives.mlm import MLMHead
from vlp.tasks.downstream.registry import get_task, task_kinds
from vlp.tasks.task import PlainTask, Precision

logger = logging.getLogger(__name__)

TASK = "task.json"
_MODEL, _PRETRAINED = "model.", "mlm_head."
# Parts of the model that only its own scores of pairs read, and no head on its states.
SCORES = frozenset(
    {
        *("image_encoder.projection", "text_encoder.projection", "temperature"),
        *("image_tokens", "text_tokens", "token_score", "match_head"),
    }
)


class TaskConfig(Config):
    """Base of the configurations of all downstream tasks; `kind` is a task of the registry."""

    kind: str = Field(description="name of a task in vlp.tasks.downstream.registry")
    data: Any = Field(description="data of the task")


class DownstreamConfig(TaskConfig):
    """Configuration of a task with a head of its own."""

    data: DownstreamDataConfig = Field(description="shards to train on and to validate on")


class Downstream(PlainTask):
    """Base of tasks with a head: a subclass adds it, `forward(batch, step)`, `dataset`, `predict`.

    `metric` names the evaluation's figure that chooses the best model; `untrained` names parts of
    the model that the loss does not read, which are frozen.
    """

    metric: ClassVar[str]
    untrained: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, config: DownstreamConfig, parts: Loaded, precision: Precision = "float32"
    ) -> None:
        super().__init__(precision)
        self.config = config
        self.model: VLPModel = parts.model
        self.model.freeze_untrained(self.untrained)
        self.text: TextProcessor = parts.text
        self.preprocess: Preprocessing = parts.preprocess

    @property
    def kind(self) -> str:
        """Return its kind in the registry."""
        return self.config.kind

    def metadata(self) -> dict[str, Any]:
        """Return JSON values that came from the training data, such as a list of answers."""
        return {}

    @classmethod
    def restore(cls, config: Any, parts: Loaded, metadata: Mapping[str, Any]) -> Self:
        """Make the task that a model folder describes, with a fresh head."""
        return cls(config, parts)

    def dataset(
        self, folders: Sequence[str | Path], limit: int | None = None
    ) -> DownstreamDataset[Any, Any]:
        """Return the items of shard folders as the task reads them."""
        raise NotImplementedError

    def predict(self, batch: Any) -> list[str]:
        """Predict a class name, answer or caption for each item of a batch."""
        raise NotImplementedError

    def goes_on_from(self, metadata: Mapping[str, Any]) -> bool:
        """Return whether a head of this kind, trained with such `metadata`, may start this one."""
        return metadata == self.metadata()

    def take_head(self, parts: Loaded) -> bool:
        """Copy the head of a folder fine-tuned for the same kind of task; return if it fits."""
        if parts.folder is None or not has_task(parts.folder):
            return False
        config, metadata = read_task(parts.folder)
        local_head = {n: t for n, t in self.state_dict().items() if not n.startswith(_MODEL)}
        shapes = {name: tensor.shape for name, tensor in local_head.items()}
        fits = {name: tensor.shape for name, tensor in parts.heads.items()} == shapes
        if (decoder := getattr(self.config, "decoder", None)) is not None:
            # Its weights have the same shapes for any number of heads.
            cross_heads = self.model.config.cross.heads
            saved_heads = (config.get("decoder") or {}).get("heads")
            fits = fits and (saved_heads or cross_heads) == (decoder.heads or cross_heads)
        if config["kind"] != self.kind or not fits or not self.goes_on_from(metadata):
            return False
        self.load_state_dict(dict(parts.heads), strict=False)
        return True

    @property
    def prepare(self) -> ImagePreparation:
        """Return how images become pixels."""
        data = self.config.data
        return ImagePreparation(
            TrainTransform(data.augment, self.preprocess),
            self.preprocess,
            data.view,
            self.model.config.image.patch_size,
        )

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the model folder, from the task's full state."""
        model = {n.removeprefix(_MODEL): t for n, t in state.items() if n.startswith(_MODEL)}
        heads = {name: tensor for name, tensor in state.items() if not name.startswith(_MODEL)}
        save_pretrained(folder, self.model.config, model, self.text, self.preprocess, heads)
        content = {"task": self.config.model_dump(mode="json"), "known": self.metadata()}
        if (plugin := plugin_of(type(self.config))) is not None:
            content["plugins"] = {self.kind: plugin}
        write_json(folder / TASK, content)


def load_task(folder_or_name: str | Path) -> Downstream:
    """Load a fine-tuned task in evaluation mode, on the CPU."""
    loaded = from_pretrained(folder_or_name)
    config, metadata = read_task(folder_or_name)
    spec = get_task(config["kind"])
    if spec.restore is None:
        raise ValueError(f"{folder_or_name}: a model for {spec.kind} has no head to load")
    checked = validate(config, spec.config, (loaded.folder or Path()) / TASK)
    restore = partial(spec.restore, checked, loaded, metadata)
    require_sizes(config, restore, loaded.heads, (loaded.folder or Path()) / TASK)
    task: Downstream = restore()
    try:
        missing, unknown = task.load_state_dict(dict(loaded.heads), strict=False)
    except RuntimeError as error:
        raise ValueError(f"{folder_or_name}: the head does not fit: {error}") from error
    missing = [name for name in missing if not name.startswith(_MODEL)]
    if missing or unknown:
        raise ValueError(
            f"{folder_or_name}: the head's weights do not fit {config['kind']}: missing "
            f"{missing}, unknown {unknown}"
        )
    return task.eval()


def has_task(folder: str | Path) -> bool:
    """Return whether a model folder was fine-tuned for a task with a head of its own."""
    return (local_folder(folder) / TASK).is_file()


def read_task(folder: str | Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Read the task's configuration and `metadata`, as `save_model` wrote them."""
    file = local_folder(folder) / TASK
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder}: no {TASK}; this model was pretrained, not fine-tuned for a task"
        )
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        require_plugins(content.get("plugins", {}), task_kinds(), "task", file)
        config: dict[str, Any] = content["task"]
        get_task(config["kind"])
        return config, content["known"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: damaged ({error!r})") from error


# Anchor threshold for a folder without one, from the paper of ACE-RPE (Table 7).
DELTA = 0.05


def start_parts(start: str, changes: Mapping[str, Any]) -> tuple[Loaded, LoadReport]:
    """Load a model folder, with changes of its configuration, as the start of fine-tuning.

    Args:
        start: model folder, or a name on the hub.
        changes: of the folder's configuration, key by key: `{image: {image_size: 384}}`. Image
            positions are resampled; encodings and projections that the folder lacks start anew.
    """
    try:
        folder = local_folder(start)
        plain = plain_config(folder / CONFIG)
    except OSError as error:
        raise ConfigError(f"start: {start} is no model folder ({error})") from error
    try:
        config = ModelConfig.model_validate(merge(plain, changes))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(
            f"model: with these changes {start} has no valid configuration: {key or 'the model'}: "
            f"{problem['msg']}"
        ) from error
    for part in ("text", "image", "cross"):
        if (changes.get(part) or {}).get("weights"):
            raise ConfigError(
                f"model.{part}.weights: fine-tuning takes all weights from {start}; leave it out"
            )
    model = VLPModel(config)
    try:
        report = start_from(model, folder)
        add_lora(model)
        heads = read_heads(folder)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"start: {error}") from error
    # Retrieval and grounding then move the threshold, and tasks with a head leave it.
    if "anchor" in config.cross.position and model.anchor_threshold == 0:
        model.anchor_threshold.fill_(DELTA)
    text = TextProcessor.load(folder, config.text.max_tokens)
    stored = Preprocessing.load(folder)
    preprocess = Preprocessing(config.image.image_size, stored.mean, stored.std)
    return Loaded(model, text, preprocess, heads, folder), report


class WritingTask(Downstream):
    """Base of tasks with a decoder of texts; a subclass calls `add_decoder` in its constructor."""

    decoder: AnswerDecoder

    def add_decoder(self, config: AnswerDecoderConfig, parts: Loaded, max_tokens: int) -> None:
        """Create the decoder of texts of at most `max_tokens`, [CLS] and [SEP] in."""
        text = parts.model.config.text
        if max_tokens > text.max_positions:
            raise ConfigError(
                f"task.data: texts of {max_tokens} tokens are to be written, and the model has "
                f"{text.max_positions} positions"
            )
        self.max_tokens = max_tokens
        head = MLMHead(text.width, text.vocab_size)
        self.decoder = AnswerDecoder(config, parts.model.config, head)

    def start_decoder(self, parts: Loaded) -> None:
        """Initialise layers as configured, and the output from pretraining's MLM head."""
        decoder = self.decoder
        try:
            reports = start_decoder(decoder, parts.model)
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(f"task.decoder: {error}") from error
        for report in reports:
            logger.info("%s", report)
        if decoder.config.start == "none" and decoder.config.weights is None:
            return
        head = decoder.head.state_dict()
        start = {name: parts.heads.get(f"{_PRETRAINED}{name}") for name in head}
        fits = [w for name, w in start.items() if w is not None and w.shape == head[name].shape]
        if len(fits) == len(head):
            with torch.no_grad():
                for weight, source in zip(head.values(), fits):
                    weight.copy_(source)
            logger.info("the head of masked words -> answer decoder")

    def goes_on_from(self, metadata: Mapping[str, Any]) -> bool:
        """Return True unless the decoder's start is configured."""
        config = self.decoder.config
        return config.start != "none" and config.weights is None

    def write_texts(self, memory: Memory, beams: int, penalty: float = 0.6) -> list[str]:
        """Write a text for each row of the decoder's memory."""
        text = self.text
        # Special tokens are never generated, but for the end.
        suppressed = tuple(token for token in text.special_ids if token != text.sep_id)
        marks = SpecialIds(text.cls_id, text.sep_id, suppressed)
        embedding = self.model.text_encoder.embedding
        ids = generate(self.decoder, memory, embedding, marks, self.max_tokens - 1, beams, penalty)
        rows = [
            row[: row.index(text.sep_id)] if text.sep_id in row else row for row in ids.tolist()
        ]
        return [text.tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    def text_probability(self, memory: Memory, words: TextProcessor, text: str) -> float:
        """Compute the probability of all word pieces of a text and of its end."""
        embedding = self.model.text_encoder.embedding
        ids = words([text]).text_ids.to(next(self.parameters()).device)
        likelihood = answer_likelihood(self.decoder, memory, ids, embedding, self.text.pad_id)
        return float(likelihood.log_probability.exp())
