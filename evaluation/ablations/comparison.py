"""The ablation of `vlp positions compare`: one classifier with each of several encodings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.ablations.ablation import plan
from evaluation.ablations.config import AblationConfig
from vlp.config import ConfigError, dump_yaml, load_config
from vlp.io import write_text
from vlp.models.vision.backbone import create_backbone
from vlp.positions import CROSS_MODAL, list_positions, place_roles, position_options
from vlp.positions.options import nearest
from vlp.tasks.classification.task import ClassificationConfig
from vlp.training.vision_config import VisionConfig

OWN, NONE = "own", "none"
"""Rows beside those of encodings: the model with its own positions, and without any."""
TESTS = ("test", "val", "validation")


def find_data(data: Path, test: Path | None) -> tuple[Path, Path]:
    """Return images to train on and to evaluate on.

    Args:
        data: a folder with `train` and `test` (or `val`), each a folder of class folders or a tar
            file of one; or only the images to train on, beside `test`.
        test: images to evaluate on.

    Raises:
        ConfigError: there is none, or nothing to evaluate on.
    """
    if not data.exists():
        raise ConfigError(f"--data {data}: there is neither a folder nor a tar file")
    train = _part(data, ("train",)) or data
    held_out = test or _part(data, TESTS)
    if held_out is None:
        raise ConfigError(
            f"--data {data}: it has no part {', '.join(TESTS)}; give the images to evaluate on by "
            "--test"
        )
    return train, held_out


def parse_encodings(text: str) -> dict[str, dict[str, Any]]:
    """Read `irpe-product:qk,rope-mixed,own`: variants with what they override.

    Args:
        text: names with commas between them; letters of "qkv" after a colon say where an encoding
            acts.

    Raises:
        ConfigError: an unknown name (the nearest is given), one that is there twice, an encoding of
            cross-modal attention, or letters that it has no choice of.
    """
    variants: dict[str, dict[str, Any]] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, colon, letters = each.partition(":")
        if each in variants:
            raise ConfigError(f"--encodings names {each} twice")
        if name in (OWN, NONE) and not colon:
            variants[each] = {}
            continue
        if name in CROSS_MODAL:
            raise ConfigError(f"--encodings: {name} lies between an image and a text")
        known = list_positions()
        if name not in known:
            raise ConfigError(
                f"--encodings: unknown position encoding {name!r}{nearest(name, known)}; `vlp "
                "positions list` names them, --plugin FILE.py registers one of your own"
            )
        try:
            place_roles(name, letters if colon else None, {}, position_options(name))
        except ValueError as error:
            raise ConfigError(f"--encodings: {error}") from error
        variants[each] = {"name": name, **({"roles": letters} if colon else {})}
    if not variants:
        raise ConfigError("--encodings names none; write rope-mixed,irpe-product")
    return variants


def write_comparison(
    out: Path,
    model: Mapping[str, Any],
    encodings: Mapping[str, Mapping[str, Any]],
    data: tuple[Path, Path],
    seeds: Sequence[int],
    training: Mapping[str, Any],
    absolute: str = "drop",
    reference: str = OWN,
    jobs: int = 1,
    plugins: Sequence[str] = (),
) -> Path:
    """Write the ablation of a comparison, which `vlp ablate` runs, too; returns its file.

    Args:
        out: folder of all runs and of the report.
        model: `name`, `options`, `pretrained` of the timm model.
        encodings: of `parse_encodings`.
        data: of `find_data`.
        seeds: two or more; tests are paired by them.
        training: overrides by dotted key, such as training.steps.
        absolute: whether encodings stand beside ("keep") the model's own positions, or replace
            them ("drop").
        reference: the variant that the others are compared with.
        jobs: runs side by side.
        plugins: modules that register encodings.

    Raises:
        ConfigError: fewer than two seeds.
    """
    if len(set(seeds)) < 2:
        raise ConfigError(f"--seeds {','.join(map(str, seeds))}: a paired test needs two or more")
    variants = {reference: {}, **encodings} if reference not in encodings else dict(encodings)
    train, test = data
    stage = {f"task.model.{key}": value for key, value in model.items()} | {
        "task.data.train": str(train),
        "task.data.test": str(test),
        **training,
    }
    write_text(out / "training.yaml", "task: {kind: classification}\n")
    plain = {
        "output": str(out),
        "plugins": list(plugins),
        "seeds": list(seeds),
        "jobs": jobs,
        "expected_deviation": 1.0,
        "training": {"config": "training.yaml", "overrides": stage},
        "variants": {
            name: {
                "overrides": {
                    "task.model.positions": [encoding] if encoding else [],
                    "task.model.absolute": {OWN: "keep", NONE: "drop"}.get(name, absolute),
                }
            }
            for name, encoding in variants.items()
        },
        "tables": [
            {
                "title": f"Position encodings in {model['name']}",
                "figures": {"top-1": "top1", "top-5": "top5", "loss": "loss"},
                "reference": reference,
                "decimals": 2,
                "rows": [{"label": name, "variant": name} for name in variants],
            }
        ],
    }
    file = out / "comparison.yaml"
    write_text(file, f"# vlp ablate --config {file}\n{dump_yaml(plain)}")
    return file


def check_models(config: AblationConfig, file: Path) -> None:
    """Make the model of each variant once, before anything is trained.

    Raises:
        ConfigError: an unknown setting or model, or an encoding that does not fit.
    """
    for run in {run.name.partition("/")[0]: run for run in plan(config, file)[1]}.values():
        task = load_config(file.parent / "training.yaml", VisionConfig, run.changes()).task
        assert isinstance(task, ClassificationConfig)
        fast = task.model.model_copy(update={"pretrained": False})
        create_backbone(fast, num_classes=2, img_size=task.data.image_size)


def _part(data: Path, names: Sequence[str]) -> Path | None:
    """Return a folder or tar file of one of these names."""
    if not data.is_dir():
        return None
    for name in names:
        if (data / name).is_dir():
            return data / name
        tars = sorted(data.glob(f"{name}.tar*"))
        if tars:
            return tars[0]
    return None
