"""Contact sheets: small images of samples in a grid, with their captions under them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from tqdm import tqdm
from typer import Argument, Option

from data_tools.options import at_least_1
from data_tools.shards import Shard, ShardReader, shards_of
from vlp.config import ConfigError
from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.index import INDEX_NAME, ShardTable, read_table
from vlp.data.shards.sample_files import BadSample
from vlp.io import atomic_write


def peek(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="folder of shards")],
    out: Annotated[Path, Option(metavar="FILE.png", help="the PNG to write")],
    count: Annotated[int, Option(metavar="N", help="samples")] = 36,
    columns: Annotated[int, Option(metavar="N", help="cards in a row")] = 6,
    seed: Annotated[int, Option(help="of the random choice")] = 0,
    first: Annotated[bool, Option("--first", help="the first samples instead")] = False,
    boxes: Annotated[bool, Option("--boxes", help="frame the boxes of expressions")] = False,
) -> int:
    """Draw some samples of a folder of shards as one image: thumbnails with their captions.

        python -m data_tools peek shards/cc3m --out sheet.png
        python -m data_tools peek shards/refcoco --out sheet.png --boxes --count 24 --seed 3
        python -m data_tools peek shards/cc3m --out sheet.png --first

    Samples are drawn at random unless --first asks for the first ones. A damaged sample is a grey
    card that names the damage. The folder needs its index.npz.
    """
    at_least_1(count=count, columns=columns)
    table = read_index(folder)
    if not table.total:
        raise ConfigError(f"{folder}: its shards are empty")
    cards = []
    for name, number in tqdm(choose(table, count, None if first else seed), desc="peek"):
        with ShardReader(folder / name) as shard:
            cards.append(sample_card(shard, number, boxes))
    draw_sheet(cards, out, columns)
    damaged = sum(card.image is None for card in cards)
    told = f", {damaged} of them damaged" if damaged else ""
    print(f"{out}: {len(cards)} of {table.total} samples{told}")
    return 0


def read_index(folder: Path) -> ShardTable:
    """Return the shards that the index of a folder names."""
    shards_of([folder])
    path = folder / INDEX_NAME
    remedy = f"make one with: python -m data_tools index {folder}"
    try:
        with path.open("rb") as file:
            return read_table(file, str(path), remedy)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error


def choose(table: ShardTable, count: int, seed: int | None) -> list[tuple[str, int]]:
    """Choose shards and sample numbers, in order, each once; the first ones without a seed."""
    count = min(count, table.total)
    if seed is None:
        places = np.arange(count)
    else:
        places = np.sort(np.random.default_rng(seed).choice(table.total, count, replace=False))
    ends = np.cumsum(table.samples)
    shards = np.searchsorted(ends, places, side="right")
    numbers = places - (ends - table.samples)[shards]
    return [(table[shard].name, int(number)) for shard, number in zip(shards, numbers)]


WIDTH = 240
"""Of a card, and the height of its image; in pixels."""
LINES = 9
"""A card shows at most so many lines of text."""

_GAP, _LINE, _TEXT = 8, 15, 11
_PAPER, _INK, _FAINT, _GREY = "white", "#202020", "#707070", "#c8c8c8"
_COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2")


class Frame(NamedTuple):
    """A box, [x, y, width, height] in pixels of the stored image, and what it shows."""

    box: Sequence[float]
    text: str


class Card(NamedTuple):
    """One sample; without an image, `problem` says why."""

    title: str
    image: Image.Image | None
    texts: Sequence[str] = ()
    frames: Sequence[Frame] = ()
    problem: str = ""


def sample_card(shard: ShardReader, number: int, boxes: bool = False, note: str = "") -> Card:
    """Return the card of a sample; a damaged one becomes a card that says what is wrong.

    Framed are the boxes of its expressions, or its `boxes` where it has no expressions.
    """
    notes = (note,) if note else ()
    if number >= len(shard):
        kind = "missing shard" if shard.missing else "corrupt shard"
        return Card(f"{shard.path.name}, sample {number}", None, notes, problem=kind)
    files = shard.samples[number]
    title, where = files.key, shard.where(files)
    try:
        sample = shard.read(files)
    except BadSample as bad:
        return Card(title, None, (*notes, _told(bad, where)), problem=bad.kind)
    annotation = sample.annotation
    try:
        image = decode_image(sample.image, where)
        second = None
        if sample.second_image is not None:
            second = decode_image(sample.second_image, where)
    except BadSample as bad:
        told = _told(bad, where)
        return Card(title, None, (*notes, told, *captions_of(annotation)), problem=bad.kind)
    frames = _frames(annotation) if boxes else []
    if second is not None:
        image = _beside(image, second)
    return Card(title, image, (*notes, *_texts(annotation)), frames)


def draw_sheet(cards: Sequence[Card], path: Path, columns: int = 6) -> Path:
    """Draw the cards in rows and save them as a PNG; the folder is made if it is missing."""
    drawn = [_draw_card(card) for card in cards]
    rows = [drawn[start : start + columns] for start in range(0, len(drawn), columns)]
    heights = [max(card.height for card in row) for row in rows]
    widest = max((len(row) for row in rows), default=1)
    size = widest * (WIDTH + _GAP) + _GAP, sum(heights) + _GAP * (len(rows) + 1)
    sheet = Image.new("RGB", size, _PAPER)
    top = _GAP
    for row, height in zip(rows, heights):
        for column, card in enumerate(row):
            sheet.paste(card, (_GAP + column * (WIDTH + _GAP), top))
        top += height + _GAP
    with atomic_write(path, error=ConfigError) as file:
        sheet.save(file, "png")
    return path


class SheetCell(NamedTuple):
    """A sample for a sheet of pairs, and what is said about it."""

    shard: Shard
    number: int
    note: str


def draw_pairs(pairs: Sequence[tuple[SheetCell, SheetCell]], path: Path) -> None:
    """Draw pairs of samples side by side, three pairs in a row."""
    cards = []
    for shown in (each for pair in pairs for each in pair):
        with ShardReader(shown.shard.path) as opened:
            cards.append(sample_card(opened, shown.number, note=shown.note))
    draw_sheet(cards, path, columns=6)
    print(f"{path}: {len(pairs)} pairs, the most different first")


def wrapped(text: str, width: float, font: ImageFont.FreeTypeFont) -> list[str]:
    """Return lines of at most `width` pixels; a word that is longer is cut."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return [line for line in lines if line]


def _draw_card(card: Card) -> Image.Image:
    # What the frames say comes first: it is what they were asked for.
    texts = [
        (frame.text, _COLOURS[number % len(_COLOURS)]) for number, frame in enumerate(card.frames)
    ]
    texts += [(text, _INK) for text in card.texts]
    lines = [(line, colour) for text, colour in texts for line in _marked(text)]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], (f"… and {len(lines) - LINES + 1} more lines", _FAINT)]
    drawn = Image.new("RGB", (WIDTH, WIDTH + _LINE * (len(lines) + 1) + 4), _PAPER)
    draw = ImageDraw.Draw(drawn)
    if card.image is None:
        draw.rectangle((0, 0, WIDTH - 1, WIDTH - 1), _GREY)
        for number, line in enumerate(wrapped(card.problem, WIDTH - 20, _font(16, bold=True))):
            draw.text((10, WIDTH // 2 - 20 + 20 * number), line, _INK, _font(16, bold=True))
    else:
        # Small ones are enlarged: a sheet is for looking at.
        small = ImageOps.contain(card.image, (WIDTH, WIDTH), Image.Resampling.LANCZOS)
        left, top = (WIDTH - small.width) // 2, (WIDTH - small.height) // 2
        drawn.paste(small, (left, top))
        across, down = small.width / card.image.width, small.height / card.image.height
        for number, frame in enumerate(card.frames):
            x, y, width, height = frame.box
            corners = (
                sorted((x * across, (x + width) * across)),
                sorted((y * down, (y + height) * down)),
            )
            place = [(left + corners[0][end], top + corners[1][end]) for end in (0, 1)]
            draw.rectangle(place, outline=_COLOURS[number % len(_COLOURS)], width=2)
    title = wrapped(card.title, WIDTH, _font(_TEXT, bold=True))
    draw.text((0, WIDTH + 2), title[0] if title else "", _INK, _font(_TEXT, bold=True))
    for number, (line, colour) in enumerate(lines):
        draw.text((0, WIDTH + 2 + _LINE * (number + 1)), line, colour, _font(_TEXT))
    return drawn


def _marked(text: str) -> list[str]:
    """Return the lines of one text; all but the first are indented to show where it begins."""
    first, *rest = wrapped(text, WIDTH - 12, _font(_TEXT)) or [""]
    return [first, *(f"   {line}" for line in rest)]


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


def _frames(annotation: Annotation) -> list[Frame]:
    if annotation.expressions:
        return [Frame(expression.box, expression.text) for expression in annotation.expressions]
    return [Frame(box, f"box {number}") for number, box in enumerate(annotation.boxes or ())]


def _beside(first: Image.Image, second: Image.Image) -> Image.Image:
    height = max(first.height, second.height)
    both = Image.new("RGB", (first.width + second.width + height // 20, height), _PAPER)
    both.paste(first, (0, 0))
    both.paste(second, (both.width - second.width, 0))
    return both


def _told(bad: BadSample, where: str) -> str:
    """Return the fault without the place, which the title says already."""
    reason = bad.where.removeprefix(where).strip()
    return reason.removeprefix("(").removesuffix(")") or bad.kind


@cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    # Matplotlib brings a font of many scripts along; Pillow's own knows Latin letters alone.
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)
