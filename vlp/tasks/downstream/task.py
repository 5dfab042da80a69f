"""A pretrained model with the head of one benchmark, and its model folder.

`vlp.load` reads the model alone. The head's weights are in `heads.safetensors`, the task's
configuration in `task.json`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Self

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
    initialise_decoder,
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
from vlp.tasks.task import Precision, Task, strip_prefix

logger = logging.getLogger(__name__)

TASK = "task.json"
_MODEL, _MLM_HEAD = "model.", "mlm_head."
# Parts of the model for ITC and ITM scores, which tasks with a head do not compute.
SCORES = frozenset(
    {
        *("image_encoder.projection", "text_encoder.projection", "temperature"),
        *("image_tokens", "text_tokens", "token_score", "match_head"),
    }
)


class TaskConfig(Config):
    """Base of the configurations of all downstream tasks."""

    kind: str = Field(description="name of a task in vlp.tasks.downstream.registry")
    data: Any = Field(description="data of the task")


class DownstreamConfig(TaskConfig):
    """Configuration of a task with a head."""

    data: DownstreamDataConfig = Field(description="shards to train on and to validate on")


class Downstream(Task):
    """Base of tasks with a head; a subclass adds the head, `forward`, `dataset` and `predict`.

    Args:
        parts: the model, its tokenizer and preprocessing, and heads of its folder.
    """

    # Figure of the evaluation that chooses the best model.
    metric: ClassVar[str]
    # Modules of the model that get no gradient from the loss.
    frozen_parts: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, config: DownstreamConfig, parts: Loaded, precision: Precision = "float32"
    ) -> None:
        super().__init__(precision)
        self.config = config
        self.model: VLPModel = parts.model
        self.model.freeze_modules(self.frozen_parts)
        self.text: TextProcessor = parts.text
        self.preprocess: Preprocessing = parts.preprocess

    @property
    def kind(self) -> str:
        """Return the kind of task in the registry."""
        return self.config.kind

    def metadata(self) -> dict[str, Any]:
        """Return JSON values from the training data that `restore` needs, such as answers."""
        return {}

    @classmethod
    def restore(cls, config: Any, parts: Loaded, metadata: Mapping[str, Any]) -> Self:
        """Create the task of a model folder; the caller loads the head's weights."""
        return cls(config, parts)

    def dataset(
        self, folders: Sequence[str | Path], limit: int | None = None
    ) -> DownstreamDataset[Any, Any]:
        """Return the dataset of shard folders' first `limit` items."""
        raise NotImplementedError

    def predict(self, batch: Any) -> list[str]:
        """Predict a class name, answer or caption for each item of a batch."""
        raise NotImplementedError

    def accepts_head(self, metadata: Mapping[str, Any]) -> bool:
        """Return whether to start from a head of the same kind that was saved with `metadata`."""
        return metadata == self.metadata()

    def load_head(self, parts: Loaded) -> bool:
        """Copy the head of the folder of `parts` if it fits this task; return whether it does."""
        if parts.folder is None or not has_task(parts.folder):
            return False
        config, metadata = read_task(parts.folder)
        if config["kind"] != self.kind or not self.accepts_head(metadata):
            return False
        state = self.state_dict()
        shapes = {n: tensor.shape for n, tensor in state.items() if not n.startswith(_MODEL)}
        if {n: tensor.shape for n, tensor in parts.heads.items()} != shapes:
            return False
        decoder = getattr(self.config, "decoder", None)
        if decoder is not None:
            # The weights have the same shapes for any number of attention heads.
            cross_heads = self.model.config.cross.heads
            saved_heads = (config.get("decoder") or {}).get("heads")
            if (saved_heads or cross_heads) != (decoder.heads or cross_heads):
                return False
        self.load_state_dict(dict(parts.heads), strict=False)
        return True

    @property
    def prepare(self) -> ImagePreparation:
        """Return the preparation of images for training and evaluation."""
        data = self.config.data
        return ImagePreparation(
            TrainTransform(data.augment, self.preprocess),
            self.preprocess,
            data.view,
            self.model.config.image.patch_size,
        )

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write a model folder for `load_task`; `state` is the full `state_dict` of this task."""
        model = strip_prefix(state, _MODEL)
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
    entry = get_task(config["kind"])
    if entry.restore is None:
        raise ValueError(f"{folder_or_name}: a model for {entry.kind} has no head to load")
    file = (loaded.folder or Path()) / TASK
    restore = partial(entry.restore, validate(config, entry.config, file), loaded, metadata)
    # Absurd sizes in a foreign file would fill the memory before the weights are compared.
    require_sizes(config, restore, loaded.heads, file)
    task: Downstream = restore()
    try:
        missing, unknown = task.load_state_dict(dict(loaded.heads), strict=False)
    except RuntimeError as error:
        raise ValueError(f"{folder_or_name}: the head does not fit: {error}") from error
    missing = [name for name in missing if not name.startswith(_MODEL)]
    if missing or unknown:
        raise ValueError(
            f"{folder_or_name}: the head's weights do not fit {entry.kind}: missing "
            f"{missing}, unknown {unknown}"
        )
    return task.eval()


def has_task(folder: str | Path) -> bool:
    """Return whether a model folder was fine-tuned for a task with a head."""
    return (local_folder(folder) / TASK).is_file()


def read_task(folder: str | Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Read the task's configuration and `metadata` that `Downstream.save_model` wrote."""
    file = local_folder(folder) / TASK
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no {TASK}: the model is not fine-tuned for a task with a head"
        )
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        require_plugins(content.get("plugins", {}), task_kinds(), "task", file)
        config: dict[str, Any] = content["task"]
        get_task(config["kind"])
        return config, content["known"]
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: damaged ({error!r})") from error


# Anchor threshold of a folder without one, from the paper of ACE-RPE (Table 7).
DELTA = 0.05


def start_parts(init_from: str, changes: Mapping[str, Any]) -> tuple[Loaded, LoadReport]:
    """Load a model folder, with changes of its configuration, as the start of fine-tuning.

    Args:
        init_from: model folder, or a name on the hub.
        changes: of the folder's configuration, key by key: `{image: {image_size: 384}}`. Image
            positions are resampled; encodings and projections that the folder lacks keep their
            initial weights.
    """
    try:
        folder = local_folder(init_from)
        values = plain_config(folder / CONFIG)
    except OSError as error:
        raise ConfigError(f"init_from: {init_from} is no model folder ({error})") from error
    try:
        config = ModelConfig.model_validate(merge(values, changes))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, ("model", *problem["loc"])))
        raise ConfigError(
            f"{key}: {problem['msg']} (in the configuration of {init_from} with these changes)"
        ) from error
    for part in ("text", "image", "cross"):
        if (changes.get(part) or {}).get("weights"):
            raise ConfigError(
                f"model.{part}.weights: fine-tuning loads all weights from init_from "
                f"{init_from}; leave the key out"
            )
    model = VLPModel(config)
    try:
        report = start_from(model, folder)
        add_lora(model)
        heads = read_heads(folder)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"init_from: {error}") from error
    # At 0 nearly every patch would be an anchor. Retrieval and grounding update the threshold.
    if "anchor" in config.cross.position and model.anchor_threshold == 0:
        model.anchor_threshold.fill_(DELTA)
    text = TextProcessor.load(folder, config.text.max_tokens)
    stored = Preprocessing.load(folder)
    preprocess = Preprocessing(config.image.image_size, stored.mean, stored.std)
    return Loaded(model, text, preprocess, heads, folder), report


class WritingTask(Downstream):
    """Base of tasks that generate text; a subclass calls `add_decoder` in its constructor."""

    decoder: AnswerDecoder

    def add_decoder(self, config: AnswerDecoderConfig, parts: Loaded, max_tokens: int) -> None:
        """Create a decoder for texts of at most `max_tokens` tokens, [CLS] and [SEP] included."""
        text = parts.model.config.text
        if max_tokens > text.max_positions:
            raise ConfigError(
                f"task.data: captions or answers of up to {max_tokens} tokens need as many "
                f"positions, but the model has {text.max_positions}; lower the maximum"
            )
        self.max_tokens = max_tokens
        head = MLMHead(text.width, text.vocab_size)
        self.decoder = AnswerDecoder(config, parts.model.config, head)

    def init_decoder(self, parts: Loaded) -> None:
        """Copy the folder's decoder if it fits; else start its layers and head as configured."""
        if self.load_head(parts):
            return
        decoder = self.decoder
        try:
            reports = initialise_decoder(decoder, parts.model)
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(f"task.decoder: {error}") from error
        for report in reports:
            logger.info("%s", report)
        if decoder.config.start == "none" and decoder.config.weights is None:
            return
        head, mlm_head = decoder.head.state_dict(), strip_prefix(parts.heads, _MLM_HEAD)
        weights = {n: w for n, w in mlm_head.items() if n in head and w.shape == head[n].shape}
        if len(weights) == len(head):
            decoder.head.load_state_dict(weights)
            logger.info("MLM head -> answer decoder: %d tensors", len(weights))

    def accepts_head(self, metadata: Mapping[str, Any]) -> bool:
        """Return False if the configuration gives the decoder other initial weights."""
        config = self.decoder.config
        return config.start != "none" and config.weights is None

    def write_texts(self, memory: Memory, beams: int, penalty: float = 0.6) -> list[str]:
        """Generate a text for each row of the decoder's memory."""
        text = self.text
        # The end token is the only special token that is generated.
        suppressed = tuple(token for token in text.special_ids if token != text.sep_id)
        special_ids = SpecialIds(text.cls_id, text.sep_id, suppressed)
        embedding, length = self.model.text_encoder.embedding, self.max_tokens - 1
        ids = generate(self.decoder, memory, embedding, special_ids, length, beams, penalty)
        rows = [list(takewhile(lambda token: token != text.sep_id, row)) for row in ids.tolist()]
        return [text.tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    def text_probability(self, memory: Memory, processor: TextProcessor, text: str) -> float:
        """Return the probability of a text with its end token; `memory` has one row.

        `processor` tokenises the text.
        """
        embedding = self.model.text_encoder.embedding
        ids = processor([text]).text_ids.to(next(self.parameters()).device)
        likelihood = answer_likelihood(self.decoder, memory, ids, embedding, self.text.pad_id)
        return float(likelihood.log_probability.exp())
