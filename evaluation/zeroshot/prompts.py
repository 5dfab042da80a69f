"""Classes as texts: their names in prompts, and one feature for all prompts of a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluation.core.samples import EvaluationError
from evaluation.core.work_sharding import Ranks

PLAIN = ("a photo of a {}.",)


class Prompts(NamedTuple):
    """labels: what the data calls each class; names: what prompts call it; templates with a {}."""

    labels: tuple[str, ...]
    names: tuple[str, ...]
    templates: tuple[str, ...] = PLAIN

    def of(self, number: int) -> list[str]:
        """All prompts of one class."""
        return [template.replace("{}", self.names[number]) for template in self.templates]


def read_prompts(classes: str | Path, templates: str | Path | None = None) -> Prompts:
    """Class names, one a line, and templates, one a line; blank lines are left out.

    A line of classes may say first what the data calls the class: `n02084071<TAB>dog`.

    Raises:
        EvaluationError: a file cannot be read or is empty, a class comes twice, or a template has
            no {}.
    """
    lines = [line.split("\t", 1) for line in _lines(classes)]
    labels = tuple(line[0].strip() for line in lines)
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise EvaluationError(f"{classes}: the class {twice!r} comes twice")
    if len(labels) < 2:
        raise EvaluationError(f"{classes}: one class leaves nothing to choose")
    written = PLAIN if templates is None else tuple(_lines(templates))
    for template in written:
        if "{}" not in template:
            raise EvaluationError(
                f"{templates}: the template {template!r} has no {{}} for the class name"
            )
    return Prompts(labels, tuple(line[-1].strip() for line in lines), written)


def class_features(
    prompts: Prompts, encode: Callable[[Sequence[str]], NDArray[np.floating]], ranks: Ranks
) -> NDArray[np.float64]:
    """(classes, d) unit features: the mean over a class's prompts, at unit length (CLIP, 3.1.4).

    Args:
        prompts: of all classes.
        encode: prompts of one class -> (prompts, d) unit features.
        ranks: who share the classes.
    """

    def feature(number: int) -> NDArray[np.float64]:
        mean = np.asarray(encode(prompts.of(number)), dtype=np.float64).mean(axis=0)
        return mean / max(float(np.linalg.norm(mean)), 1e-12)

    return np.stack(ranks.map_blocks(len(prompts.labels), feature))


def _lines(path: str | Path) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read ({error})") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise EvaluationError(f"{path}: is empty; write one name a line")
    return lines
