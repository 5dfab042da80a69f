"""Screens with captioned widgets as batches of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.shards.sample_files import BadSample
from vlp.data.stream.batch import moved
from vlp.data.stream.loader import OrderedData
from vlp.data.stream.map_dataset import MapDatasetConfig, RngFactory, indexed_data
from vlp.data.vision.widgets.screen_sets import AnyScreensConfig, GeneratedScreensConfig, Screens
from vlp.data.vision.widgets.view_hierarchy import Screen
from vlp.data.vision.widgets.widget_text import WidgetText


class WidgetDataConfig(MapDatasetConfig):
    """Screens, and how much of each a model reads. The public code has 10 words everywhere."""

    screens: AnyScreensConfig = Field(
        GeneratedScreensConfig(),
        discriminator="kind",
        description="set of screens, selected by its `kind`",
    )
    vocabulary: str | None = Field(
        None,
        description="folder or hub name of a BERT tokenizer; null trains one on the screens",
        json_schema_extra={"resume": "path"},
    )
    vocabulary_size: int = Field(10_000, ge=6, description="where one is trained")
    max_words: int = Field(10, ge=1, description="word pieces of a widget's text, and resource id")
    max_caption: int = Field(10, ge=1, description="word pieces of a caption")
    max_widgets: int = Field(250, ge=1, description="of a screen, those with captions first")
    max_targets: int = Field(8, ge=1, description="widgets captioned per screen and visit")


class WidgetBatch(NamedTuple):
    """B screens of W widgets, T captions of L tokens.

    boxes (B, W, 4) float32, x0, y0, x1, y1 in shares of the screen; kinds, clickable (B, W) int64;
    words, resources (B, W, N) int64 word pieces of the text and of the resource id, padded with
    [PAD]; trees (B, W, 3) int64, see `Widget`; real (B, W) bool, False is padding; targets (T, 2)
    int64, screen and widget of each caption; captions (T, L) int64, `[CLS] ... [SEP] [PAD]`; valid
    (B,) bool. A batch without a good screen has one empty row and one empty caption.
    """

    boxes: Tensor
    kinds: Tensor
    clickable: Tensor
    words: Tensor
    resources: Tensor
    trees: Tensor
    real: Tensor
    targets: Tensor
    captions: Tensor
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> WidgetBatch:
        """Move every tensor to `device`."""
        return moved(self, device)


class EncodedScreen(NamedTuple):
    """One screen's rows of a `WidgetBatch`, with targets (T,)."""

    boxes: Tensor
    kinds: Tensor
    clickable: Tensor
    words: Tensor
    resources: Tensor
    trees: Tensor
    targets: Tensor
    captions: Tensor


def encode_screen(
    screen: Screen, text: WidgetText, spoken: Sequence[tuple[int, str]], max_widgets: int
) -> EncodedScreen:
    """Return a screen's tensors.

    Args:
        screen: with at least one widget.
        text: vocabulary.
        spoken: number of a widget, and its caption; may be repeated.
        max_widgets: how many stay: the spoken ones, then the first in pre-order.

    Raises:
        BadSample: there are no widgets, or more are spoken of than may stay.
    """
    named = dict.fromkeys(number for number, _ in spoken)
    if not screen.widgets or len(named) > max_widgets:
        raise BadSample("no widgets" if not screen.widgets else "too many widgets", screen.name)
    rest = [number for number in range(len(screen.widgets)) if number not in named]
    kept = sorted([*named, *rest[: max_widgets - len(named)]])
    place = {number: row for row, number in enumerate(kept)}
    widgets = [screen.widgets[number] for number in kept]
    return EncodedScreen(
        torch.tensor([widget.box for widget in widgets], dtype=torch.float32),
        torch.tensor([widget.kind for widget in widgets]),
        torch.tensor([int(widget.clickable) for widget in widgets]),
        torch.stack([text.words(widget.text) for widget in widgets]),
        torch.stack([text.words(widget.resource) for widget in widgets]),
        torch.tensor([widget.tree for widget in widgets]),
        torch.tensor([place[number] for number, _ in spoken], dtype=torch.int64),
        torch.stack([text.caption(caption) for _, caption in spoken])
        if spoken
        else torch.zeros(0, text.max_caption + 2, dtype=torch.int64),
    )


class WidgetSamples:
    """Encodes one training screen, with some of its widgets and one caption of each."""

    def __init__(self, screens: Screens, text: WidgetText, config: WidgetDataConfig) -> None:
        self.screens, self.text, self.config = screens, text, config

    def __len__(self) -> int:
        return len(self.screens)

    def __call__(self, number: int, rng_for: RngFactory) -> EncodedScreen:
        """Screen `number`."""
        screen = self.screens.read(number)
        if not screen.captions:
            raise BadSample("no captions", screen.name)
        most = min(self.config.max_targets, self.config.max_widgets)
        order = rng_for("widgets").permutation(list(screen.captions)).tolist()[:most]
        rng = rng_for("caption")
        spoken = [(one, str(rng.choice(screen.captions[one]))) for one in order]
        return encode_screen(screen, self.text, spoken, self.config.max_widgets)


def widget_data(
    screens: Screens, text: WidgetText, config: WidgetDataConfig, batch: int, seed: int
) -> OrderedData:
    """Training batches of screens.

    Raises:
        ConfigError: the batch does not fit the streams.
    """
    samples = WidgetSamples(screens, text, config)
    return indexed_data(len(samples), samples, Collate(text), config, batch, seed)


class Collate:
    """Screens of several sizes to one batch; a class, so that spawned workers can have it."""

    def __init__(self, text: WidgetText) -> None:
        self._pad, self._words, self._caption = text.pad_id, text.max_words, text.max_caption + 2

    def __call__(
        self, screens: Sequence[EncodedScreen], skipped: tuple[SkippedSample, ...] = ()
    ) -> WidgetBatch:
        """Pad widgets to the longest screen."""
        valid = torch.ones(len(screens), dtype=torch.bool)
        if not screens:
            screens, valid = [self._nothing()], torch.zeros(1, dtype=torch.bool)

        def rows(name: str, padding: int = 0) -> Tensor:
            parts = [getattr(screen, name) for screen in screens]
            return pad_sequence(parts, batch_first=True, padding_value=padding)

        counts = torch.tensor([len(screen.boxes) for screen in screens])
        return WidgetBatch(
            rows("boxes"),
            rows("kinds"),
            rows("clickable"),
            rows("words", self._pad),
            rows("resources", self._pad),
            rows("trees"),
            torch.arange(int(counts.max())) < counts[:, None],
            torch.cat(
                [
                    torch.stack([torch.full_like(screen.targets, row), screen.targets], -1)
                    for row, screen in enumerate(screens)
                ]
            ),
            torch.cat([screen.captions for screen in screens]),
            valid,
            skipped,
        )

    def _nothing(self) -> EncodedScreen:
        """So that every rank runs the same model, also where all its slots are empty."""
        one = torch.zeros(1, dtype=torch.int64)
        words = torch.full((1, self._words), self._pad)
        caption = torch.full((1, self._caption), self._pad)
        return EncodedScreen(
            torch.zeros(1, 4), one, one, words, words, torch.zeros(1, 3).long(), one, caption
        )
