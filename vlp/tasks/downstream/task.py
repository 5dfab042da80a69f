"""A pretrained model with the head of one benchmark, and the model folder that it leaves.

The folder is one that `vlp.load` reads, with the head's weights in `heads.safetensors` and
`task.json`, which says which head they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from vlp.config import Config, validated
from vlp.data.downstream.config import DownstreamDataConfig
from vlp.data.downstream.images import ImagePreparation
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.folder import Loaded, from_pretrained, local_folder, save_pretrained
from vlp.models.vlp import VLPModel
from vlp.tasks.plain import PlainTask, Precision

KINDS = {
    "retrieval": "retrieval",
    "grounding": "grounding",
    "snli_ve": "pair_classification",
    "nlvr2": "pair_classification",
    "nlvr2_assignment": "pair_classification",
    "vqa": "vqa",
    "caption": "caption",
}
"""The module of this package that holds each kind of task."""

TASK = "task.json"
_MODEL = "model."


class DownstreamConfig(Config):
    """What every kind of downstream task has; `kind` says which it is."""

    kind: str
    data: DownstreamDataConfig


AnyDownstream = TypeVar("AnyDownstream", bound=DownstreamConfig)


class Downstream(PlainTask):
    """Base of tasks on a pretrained model; a subclass adds its head and `forward(batch, step)`.

    Args:
        config: of the task.
        parts: model, tokenizer and preparation of images; the model is taken over.
        precision: see `PlainTask`.

    `metric` names the figure of the kind's evaluation that chooses the best model.
    """

    metric: ClassVar[str]

    def __init__(
        self, config: DownstreamConfig, parts: Loaded, precision: Precision = "float32"
    ) -> None:
        super().__init__(precision)
        self.config = config
        self.model: VLPModel = parts.model
        self.text: TextProcessor = parts.text
        self.preprocess: Preprocessing = parts.preprocess

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return self.config.kind

    def known(self) -> dict[str, Any]:
        """What the training data told and loading needs, such as a list of answers; JSON values."""
        return {}

    @property
    def prepare(self) -> ImagePreparation:
        """How images become pixels."""
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
        said = {"task": self.config.model_dump(mode="json"), "known": self.known()}
        (folder / TASK).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def load_task(folder_or_name: str | Path) -> Downstream:
    """A fine-tuned task in evaluation mode, on the CPU.

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ValueError: it holds a model without a task, or its weights do not fit.
    """
    loaded = from_pretrained(folder_or_name)
    config, known = read_task(folder_or_name)
    task: Downstream = task_module(config["kind"]).load(config, known, loaded)
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


def read_config(
    config: Mapping[str, Any], kind: type[AnyDownstream], parts: Loaded
) -> AnyDownstream:
    """The configuration that a model folder's `task.json` holds.

    Raises:
        ConfigError: it is none of this kind; the message names file and key.
    """
    return validated(config, kind, (parts.folder or Path()) / TASK)


def read_task(folder: str | Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The task's configuration and what its data told, as `save_model` wrote them.

    Raises:
        FileNotFoundError: there is no `task.json`.
        ValueError: it is damaged.
    """
    file = local_folder(folder) / TASK
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder}: no {TASK}; this model was pretrained, not fine-tuned for a task"
        )
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        config: dict[str, Any] = said["task"]
        task_module(config["kind"])
        return config, said["known"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: damaged ({error!r})") from error


def task_module(kind: str) -> Any:
    """The module of a kind: its configurations, its task, `build` and `load`.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of task {kind!r}; there are {', '.join(KINDS)}")
    return import_module(f"vlp.tasks.downstream.{KINDS[kind]}")
