"""Generated captions of widgets compared with human captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from evaluation.options import EvalOptions
from evaluation.samples import BlockReader, evenly_spaced, single_line_errors
from evaluation.work_sharding import evaluating, evaluation_autocast
from vlp.config import Precision
from vlp.data.shards.sample_files import BadSample
from vlp.tasks.caption.metrics import caption_scores, require_caption_tools
from vlp.tasks.widgets.data import Collate, Screens, encode_screen, open_screens
from vlp.tasks.widgets.screens import Screen
from vlp.tasks.widgets.task import Widgets

BATCH = 32
# Number of positions to which edges are rounded in each direction, as in tables of `learned-4d`.
POSITIONS = 100


def evaluate(task: Widgets, options: EvalOptions) -> dict[str, float]:
    """Compute BLEU-1 to 4, ROUGE-L, CIDEr, METEOR and more, times 100 as in the paper.

    `exact` is the share of captions equal to a reference. `seen` is the share of widgets with the
    box of a training widget, edges rounded to 100 positions; `cider_seen` and `cider_unseen` (Table
    4) are the means over these widgets and over the others.
    """
    config = task.config
    require_caption_tools(config.java)
    screens = open_screens(config.data.screens, "test")
    indices = evenly_spaced(len(screens), options.limit)
    candidates: list[str] = []
    references: list[Sequence[str]] = []
    boxes: list[tuple[int, ...]] = []
    with evaluating(task, options.device) as torch_device:
        reader = BlockReader(partial(_read, screens, indices), torch_device, options.workers)
        for block_screens in reader.values(range(-(-len(indices) // BATCH))):
            candidates += _generate_captions(task, block_screens, torch_device, options.precision)
            for screen in block_screens:
                references += screen.captions.values()
                boxes += [_round_box(screen.widgets[number].box) for number in screen.captions]
    with single_line_errors():
        scores = caption_scores(candidates, references, config.java)
    figures = {name: 100 * value for name, value in scores.corpus.items()}
    exact = [
        candidate in {" ".join(text.lower().split()) for text in texts}
        for candidate, texts in zip(candidates, references)
    ]
    figures["exact"] = 100 * float(np.mean(exact))
    # The paper does not define a seen position. Its overall CIDEr is the weighted mean of both
    # parts, so it averages single captions, as here.
    train_boxes = set(_rounded_boxes(open_screens(config.data.screens, "train")))
    in_training = np.array([box in train_boxes for box in boxes])
    figures["seen"] = 100 * float(in_training.mean())
    for name, mask in (("cider_seen", in_training), ("cider_unseen", ~in_training)):
        if mask.any():
            figures[name] = 100 * float(scores.per_caption["cider"][mask].mean())
    return figures


def _read(screens: Screens, indices: Sequence[int], block: int) -> list[Screen]:
    """Read a block of screens, in any process."""
    return [screens.read(index) for index in indices[block * BATCH : (block + 1) * BATCH]]


def _generate_captions(
    task: Widgets, screens: Sequence[Screen], device: torch.device, precision: Precision | None
) -> list[str]:
    """Return a caption for every widget with references, in the order of the screens."""
    data, text = task.config.data, task.text
    encoded = [
        encode_screen(screen, text, [(number, "") for number in screen.captions], data.max_widgets)
        for screen in screens
        if screen.captions
    ]
    if not encoded:
        return []
    batch = Collate(text)(encoded).to(device)
    with evaluation_autocast(device, precision) if precision else task.autocast(device):
        ids = task.model.generate(batch, data.max_caption + 1, task.config.beams)
    return [text.decode(row) for row in ids.tolist()]


def _rounded_boxes(screens: Screens) -> Iterator[tuple[int, ...]]:
    for index in range(len(screens)):
        try:
            screen = screens.read(index)
        except BadSample:
            # Training skips the screen, too.
            continue
        for widget in screen.widgets:
            yield _round_box(widget.box)


def _round_box(box: Sequence[float]) -> tuple[int, ...]:
    """Round the edges of a box, shares of the screen, to `POSITIONS` positions."""
    return tuple(round(edge * (POSITIONS - 1)) for edge in box)
