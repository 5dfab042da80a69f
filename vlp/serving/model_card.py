"""Model card of a model folder: README.md with the front matter that the hub reads."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from vlp.config import ConfigError, parse_yaml
from vlp.io import parse_json, redact, write_text
from vlp.models.config import ImageConfig, ModelConfig, TextConfig
from vlp.models.folder import HEADS, read_config, require_model, weight_shapes
from vlp.models.pretrained.local_copy import CONFIG, RESULTS, results_folder
from vlp.models.vlp import VLPModel
from vlp.tasks.downstream.registry import TaskCard, get_task
from vlp.tasks.downstream.task import TASK
from vlp.tasks.grounding.task import FILE_NAME as GROUNDING

CARD = "README.md"
MARK = "<!-- Written by vlp from the files beside it; without this line it is left as it is. -->"
# Maximum number of a result's figures in the front matter.
_MAX_FIGURES = 12

_WITHOUT_TASK = TaskCard(
    "image-text matching and retrieval (pretrained, or fine-tuned for retrieval)",
    "zero-shot-image-classification",
)
_PARTS = {
    "text_encoder": "text encoder",
    "image_encoder": "image encoder",
    "cross_encoder": "cross-modal encoder",
    "text_tokens": "token projection of texts",
    "image_tokens": "token projection of images",
    "match_head": "matching head",
}
_USE_WITHOUT_TASK = """
```python
import vlp

model, text, preprocess, *_ = vlp.load("FOLDER")
image = model.encode_image(preprocess("photo.jpg")[None])
words = model.encode_text(text(["a red circle left of a blue square"]))
similarity = image.feature @ words.feature.T
log_odds = model.match(image, words)
```
"""


class _Result(NamedTuple):
    """A saved evaluation result."""

    task: str
    shards: tuple[str, ...]  # folders
    figures: dict[str, float]  # by name, in [0, 1]
    table: str  # Markdown


def write_model_card(folder: str | Path, licence: str | None = None) -> bool:
    """Write a folder's README.md and return True; return False if it has one without `MARK`.

    licence: of the weights, by the hub's name ("apache-2.0"); None: the present card's, if any.
    """
    card = Path(folder) / CARD
    if card.is_file():
        from huggingface_hub import metadata_load

        if MARK not in card.read_text(encoding="utf-8"):
            return False
        licence = licence or (metadata_load(card) or {}).get("license")
    write_text(card, model_card(folder, licence))
    return True


def model_card(folder: str | Path, licence: str | None = None) -> str:
    """Return the card of a model folder; licence: see `write_model_card`."""
    folder = Path(folder)
    require_model(folder)
    config = read_config(folder / CONFIG)
    task = _read_json(folder / TASK).get("task") or {}
    kind, results = str(task.get("kind") or ""), list(_results(folder))
    # Grounding is marked by another file.
    is_grounding = not kind and (folder / GROUNDING).is_file()
    card = get_task(kind or "grounding").card if kind or is_grounding else _WITHOUT_TASK
    # The folders of a run are all called `model` or `best`.
    name = folder.resolve().parent.name if _run_folder(folder) else folder.resolve().name
    body = [
        _front_matter(name, kind, card, "anchor" in config.cross.position, licence, results),
        MARK,
        f"# {name}",
        f"A vision-language model trained with `vlp`, for {card.purpose}.",
        "## Use",
        _use(card, task) if kind else _USE_WITHOUT_TASK,
        "## Model",
        _model(folder, config),
        "## Training",
        _training(folder),
        "## Results",
        *([result.table for result in results] or ["None were saved beside the model."]),
        "`vlp` implements ACE-RPE, the anchor-based cross-modal relative position embedding, and "
        "the other 2D position encodings.",
    ]
    return "\n\n".join(part.strip() for part in body) + "\n"


def _front_matter(
    name: str,
    kind: str,
    card: TaskCard,
    has_anchors: bool,
    licence: str | None,
    results: list[_Result],
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    eval_results = [
        EvalResult(
            task_type=(card.pipeline or result.task) if result.task == kind else result.task,
            dataset_type=Path(result.shards[0]).name or "shards",
            dataset_name=", ".join(result.shards),
            metric_type=figure,
            metric_value=round(100 * value, 2),
        )
        for result in results
        if result.shards
        for figure, value in list(result.figures.items())[:_MAX_FIGURES]
    ]
    data = ModelCardData(
        license=licence,
        library_name="vlp",
        pipeline_tag=card.pipeline,
        tags=[
            "vision-language",
            "image-text",
            *(["ace-rpe"] if has_anchors else []),
            *([kind] if kind else []),
        ],
        model_name=name if eval_results else None,
        eval_results=eval_results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _use(card: TaskCard, task: Mapping[str, Any]) -> str:
    """Return the commands that predict with a fine-tuned model, as Markdown."""
    text = ' --text "…"' if card.text else ""
    second = " b.jpg" if task.get("images", card.images) == 2 else ""
    out = "predictions.json" if card.official else "predictions.jsonl --format jsonl"
    return (
        f"```\npython -m evaluation predict --model FOLDER --image a.jpg{second}{text}\n"
        f"python -m evaluation predict --model FOLDER --shards … --out {out}\n```"
    )


def _model(folder: Path, config: ModelConfig) -> str:
    # On the meta device parameters take no memory.
    with torch.device("meta"):
        model = VLPModel(config)
    counts = {
        name: sum(parameter.numel() for parameter in child.parameters())
        for name, child in model.named_children()
    }
    rows = [(_PARTS[name], f"{counts[name]:,}") for name in _PARTS if name in counts]
    rows.append(("in all", f"{sum(counts.values()):,}"))
    if (folder / HEADS).is_file():
        heads = sum(map(math.prod, weight_shapes(folder / HEADS).values()))
        rows.append(("heads of the training", f"{heads:,}"))
    text, image, cross = config.text, config.image, config.cross
    position = ", ".join(f"`{name}`" for name in cross.position) or "none"
    if "anchor" in cross.position:
        position += f" ({cross.anchor.groups} channel groups, mode `{cross.anchor_options.mode}`)"
    paragraph = (
        f"Texts: {model.text_encoder.depth} layers{_tower_name(text)} of width {text.width}, "
        f"{text.vocab_size:,} word pieces, up to {text.max_tokens} tokens. Images: "
        f"{model.image_encoder.depth} layers{_tower_name(image)} of width {image.width}, "
        f"{image.image_size} px in patches of {image.patch_size} px. Cross-modal: {cross.layers} "
        f"layers, layout `{cross.layout}`, position {position}."
    )
    return f"{paragraph}\n\n{_table(('part', 'parameters'), rows)}"


def _tower_name(config: TextConfig | ImageConfig) -> str:
    """Return the architecture of a tower as " of `bert`"; empty without one."""
    name = config.architecture
    if isinstance(name, Mapping):
        name = name.get("model_type", name.get("name"))
    return f" of `{name}`" if name else ""


def _training(folder: Path) -> str:
    """Return a table of the training run, as Markdown; a sentence if the run is not found."""
    run = _run_folder(folder)
    if run is None:
        return "Unknown: the folder of the training run is not the parent of the model folder."
    try:
        config = parse_yaml(redact((run / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{run / 'config.yaml'}: cannot be read ({error})") from error
    report, task = _read_json(run / "report.json"), config.get("task") or {}
    data = task.get("data") or config.get("data") or {}
    training = config.get("training") or {}
    rows = [("initialised from", f"`{config['init_from']}`")] if config.get("init_from") else []
    rows += [
        *(("data", source) for source in _sources(data)),
        ("batch", str(training.get("batch", ""))),
        ("learning rate", str((training.get("optimiser") or {}).get("learning_rate", ""))),
        ("precision", str(training.get("precision", ""))),
    ]
    if report:
        skipped = [f"{count:,} {reason}" for reason, count in report["skipped_samples"].items()]
        rows += [
            ("steps", f"{report['step']:,} of {report['total_steps']:,} ({report['ended']})"),
            ("samples seen", f"{report['samples']:,}"),
            ("samples trained on", f"{report['trained_samples']:,}"),
            ("samples skipped", ", ".join(skipped) or "0"),
            ("hours", f"{report['seconds'] / 3600:.2f}"),
            ("hardware", f"{report['ranks']} x {report['device']}"),
        ]
        if best := report.get("best"):
            best_label = "this is the best step" if folder.name == "best" else "the best step"
            rows.append((best_label, f"{best['step']:,}"))
    return _table(("", ""), [row for row in rows if row[1]])


def _sources(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each training folder: path, weight unless 1, samples if it can be read."""
    from vlp.data.shards.shard_reader import ShardIndex

    weights_by_path = [
        (str(source["path"]), float(source.get("weight", 1)))
        for source in data.get("sources") or ()
    ]
    weights_by_path += [(str(path), 1.0) for path in data.get("train") or ()]
    for path, weight in weights_by_path:
        line = f"`{path}`" + (f", weight {weight:g}" if weight != 1 else "")
        with contextlib.suppress(ConfigError, OSError):
            line += f", {len(ShardIndex.open(path)):,} samples"
        yield line


def _results(folder: Path) -> Iterator[_Result]:
    """Yield the results saved in a model folder or in its results folder, by file name."""
    # Of two files of one name, that of the run's results folder counts.
    files = {
        file.name: file
        for results in (folder / RESULTS, results_folder(folder))
        for file in results.glob("*.json")
    }
    for _, file in sorted(files.items()):
        content, table_file = _read_json(file), file.with_suffix(".md")
        if "task" in content and table_file.is_file():
            yield _Result(
                task=str(content["task"]),
                shards=tuple(map(str, content.get("shards") or ())),
                figures=_figures(content.get("figures") or {}),
                table=table_file.read_text(encoding="utf-8"),
            )


def _figures(figures: Any) -> dict[str, float]:
    """Return figures by name, of the last stage, without parts such as `question: …`."""
    if isinstance(figures, list):
        stage = figures[-1]["stage"]
        return {
            f"{row['direction']} {row['name']}": float(row["value"])
            for row in figures
            if row["stage"] == stage
        }
    return {name: float(row["value"]) for name, row in figures.items() if ": " not in name}


def _run_folder(folder: Path) -> Path | None:
    """Return the parent of a model folder if it is the run that wrote the folder, else None."""
    run = folder.resolve().parent
    return run if (run / "config.yaml").is_file() else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: damaged ({error})") from error
    return content if isinstance(content, dict) else {}


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {key} | {value} |" for key, value in (head, ("---", "---"), *rows)]
    return "\n".join(lines)
