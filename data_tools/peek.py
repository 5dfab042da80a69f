"""`vlp data peek`: a contact sheet of samples, with captions under the images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Annotated, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from tqdm import tqdm
from typer import Argument, Option

from data_tools.options import N, require_positive
from vlp.config import ConfigError
from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.index import ShardTable
from vlp.data.shards.remote import OutageConfig
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_reader import ShardIndex
from vlp.io import atomic_write


def peek(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="folder of shards")],
    out: Annotated[Path, Option(metavar="FILE.png", help="the PNG to write")],
    count: Annotated[int, N(help="samples")] = 36,
    seed: Annotated[int, Option(help="of the random choice")] = 0,
    first: Annotated[bool, Option("--first", help="the first samples instead")] = False,
    boxes: Annotated[bool, Option("--boxes", help="draw the boxes of expressions")] = False,
) -> int:
    """Draw samples of a folder of shards into one image: thumbnails with their captions.

        vlp data peek shards/cc3m --out sheet.png
        vlp data peek shards/refcoco --out sheet.png --boxes --count 24 --seed 3

    A damaged sample is a grey card that names the damage. The folder needs its index.npz.
    """
    require_positive(count=count)
    index = ShardIndex.open(folder, outages=OutageConfig(policy="skip"))
    if not len(index):
        raise ConfigError(f"{folder}: its shards are empty")
    samples = choose_samples(index.shards, count, None if first else seed)
    cards = [sample_card(index, *sample, boxes) for sample in tqdm(samples, desc="peek")]
    draw_sheet(cards, out)
    damaged = sum(card.image is None for card in cards)
    damage = f", {damaged} of them damaged" if damaged else ""
    print(f"{out}: {len(cards)} of {len(index)} samples{damage}")
    return 0


def choose_samples(table: ShardTable, count: int, seed: int | None) -> list[tuple[int, int]]:
    """Return sorted (shard, number in it) of random samples; without `seed`, of the first."""
    count = min(count, table.total)
    if seed is None:
        indices = np.arange(count)
    else:
        indices = np.sort(np.random.default_rng(seed).choice(table.total, count, replace=False))
    ends = np.cumsum(table.samples)
    shards = np.searchsorted(ends, indices, side="right")
    numbers = indices - (ends - table.samples)[shards]
    return list(zip(shards.tolist(), numbers.tolist()))


_COLUMNS, _LINES = 6, 9  # cards in a row, lines of text below an image
_WIDTH, _LINE = 2.4, 0.15  # inches: side of a card's image, height of a line below it
_COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2")


class Card(NamedTuple):
    """A sample to draw; without an image, `problem` says why."""

    title: str
    image: Image.Image | None
    texts: Sequence[str] = ()
    boxes: Sequence[tuple[Sequence[float], str]] = ()  # [x, y, width, height] in pixels, label
    problem: str = ""


def sample_card(shards: ShardIndex, shard: int, number: int, boxes: bool = False) -> Card:
    """Return a sample's card.

    boxes: with the boxes of its expressions, or without expressions those of its objects.
    """
    texts: list[str] = []
    title = f"{shards.shards[shard].name}, sample {number}"
    try:
        raw = shards.read(shard, number)
        title, texts = raw.key, captions_of(raw.annotation)
        image = decode_image(raw.image, raw.where)
        if raw.second_image is not None:
            image = _concatenate(image, decode_image(raw.second_image, raw.where))
    except BadSample as bad:
        return Card(title, None, (bad.where.rpartition("/")[2], *texts), problem=bad.kind)
    annotation = raw.annotation
    labelled_boxes = [(item.box, item.text) for item in annotation.expressions or ()] or [
        (box, f"box {index}") for index, box in enumerate(annotation.boxes or ())
    ]
    return Card(title, image, _texts(annotation), labelled_boxes if boxes else ())


def draw_sheet(cards: Sequence[Card], path: Path) -> None:
    """Draw cards in rows into a PNG; create its folder."""
    columns = min(len(cards), _COLUMNS)
    rows = -(-len(cards) // columns)
    figure = Figure(figsize=(columns * _WIDTH, rows * (_WIDTH + _LINE * (_LINES + 2))))
    grid = {"left": 0, "right": 1, "bottom": 0, "top": 1, "hspace": 0, "wspace": 0}
    for axes in figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid).flat:
        axes.axis("off")
    for card, axes in zip(cards, figure.axes):
        _draw_card(card, axes)
    with atomic_write(path, error=ConfigError) as file:
        figure.savefig(file, format="png", dpi=100)


def _draw_card(card: Card, axes: Axes) -> None:
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(card.boxes))]
    # Box labels first: the user asked for boxes.
    texts = [(label, colour) for (_, label), colour in zip(card.boxes, colours)]
    texts += [(text, "black") for text in card.texts]
    lines = [
        (f"   {line}" if number else line, colour)
        for text, colour in texts
        for number, line in enumerate(wrap(text, 38) or [""])
    ]
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], (f"… and {len(lines) - _LINES + 1} more lines", "grey")]
    axes.set_anchor("N")
    if card.image is None:
        axes.imshow(Image.new("RGB", (4, 4), "silver"))
        axes.text(1.5, 1.5, card.problem, ha="center", weight="bold")
    else:
        axes.imshow(card.image)
    for (box, _), colour in zip(card.boxes, colours):
        x, y, width, height = box
        axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=colour, linewidth=2))
    title = card.title if len(card.title) <= 36 else f"{card.title[:35]}…"
    for number, (line, colour) in enumerate([(title, "black"), *lines]):
        axes.annotate(
            line,
            (0, 0),
            (3, -11 * number - 3),  # points from the image's lower left corner
            xycoords="axes fraction",
            textcoords="offset points",
            va="top",
            color=colour,
            fontsize=7,
            weight="normal" if number else "bold",
            parse_math=False,
        )


def _texts(annotation: Annotation) -> list[str]:
    texts = captions_of(annotation)
    for name in ("premise", "hypothesis", "statement", "label"):
        value = getattr(annotation, name)
        if value is not None:
            texts.append(f"{name}: {value}")
    for question in annotation.questions or ():
        answers = ", ".join(answer.answer for answer in question.answers)
        texts.append(f"{question.question} {answers}".strip())
    return texts or ["(no caption)"]


def _concatenate(first: Image.Image, second: Image.Image) -> Image.Image:
    height = max(first.height, second.height)
    canvas = Image.new("RGB", (first.width + second.width + height // 20, height), "white")
    canvas.paste(first, (0, 0))
    canvas.paste(second, (canvas.width - second.width, 0))
    return canvas
