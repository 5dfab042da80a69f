"""Screens with captioned widgets as batches of tensors: Rico or generated, with their words."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vlp.config import Config, ConfigError
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.tar import stored_files
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import MapDatasetConfig, OrderedData, RngFactory, indexed_data
from vlp.data.stream.rng import make_rng
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.io import parse_json
from vlp.tasks.widgets.screens import Nodes, Screen, generate_screen, read_screen

Part = Literal["train", "test"]

# Generated screens in memory, about 10 KB each.
_CACHE_SIZE = 20_000


class GeneratedScreensConfig(Config):
    """Generated screens (`widgets.screens`) with disjoint random numbers per split."""

    kind: Literal["generated"] = Field("generated", description="selects this class")
    train: int = Field(2000, ge=1, description="number of screens to train on")
    test: int = Field(300, ge=1, description="number of screens to evaluate on")
    seed: int = Field(0, ge=0, description="of the corpus; all runs of a comparison share it")
    nodes: Nodes = Field(
        "all",
        description="nodes of the view hierarchy that are read; those with captions are always "
        "read",
    )


class RicoScreensConfig(Config):
    """RICO's view hierarchies and the captions of Li et al. 2020 (google-research-datasets)."""

    kind: Literal["rico"] = Field("rico", description="selects this class")
    hierarchies: str = Field(description="folder or tar file of SCREEN.json")
    captions: str = Field(
        description="widget_captions.csv: screenId, nodeId, captions with | between"
    )
    train: str = Field(description="file of screen ids, one a line, such as split/train.txt")
    test: str = Field(description="the same for the screens that are evaluated on")
    nodes: Nodes = Field(
        "all",
        description="nodes of the view hierarchy that are read; those with captions are always "
        "read",
    )


AnyScreensConfig = GeneratedScreensConfig | RicoScreensConfig


class Screens(Protocol):
    """Numbered screens."""

    def __len__(self) -> int:
        """Return the number of screens."""

    def read(self, number: int) -> Screen:
        """Read a screen."""


def open_screens(config: AnyScreensConfig, part: Part) -> Screens:
    """Return the screens of one part."""
    if isinstance(config, GeneratedScreensConfig):
        return _Generated(config, part)
    return _Rico(config, part)


class _Generated:
    def __init__(self, config: GeneratedScreensConfig, part: Part) -> None:
        self._config, self._part = config, part
        self._screens: dict[int, Screen] = {}

    def __len__(self) -> int:
        return self._config.train if self._part == "train" else self._config.test

    def read(self, number: int) -> Screen:
        if number not in self._screens:
            rng = make_rng(self._config.seed, 0, number, f"{self._part} screen")
            hierarchy, captions = generate_screen(rng)
            name = f"{self._part} {number}"
            screen = read_screen(hierarchy, name, captions, self._config.nodes)
            if len(self._screens) == _CACHE_SIZE:
                return screen
            self._screens[number] = screen
        return self._screens[number]


class _Rico:
    def __init__(self, config: RicoScreensConfig, part: Part) -> None:
        split = Path(config.train if part == "train" else config.test)
        captions = _captions(Path(config.captions))
        ids = [line.strip() for line in _text(split).split("\n") if line.strip()]
        self._names = [name for name in ids if name in captions]
        if not self._names:
            raise ConfigError(f"{config.captions}: names none of the {len(ids)} screens of {split}")
        self._captions = {name: captions[name] for name in self._names}
        self._root, self._nodes = Path(config.hierarchies), config.nodes
        self._contents: Mapping[str, bytes] | None = None
        if self._root.is_file():
            self._contents = _from_tar(self._root, set(self._names))
        elif not self._root.is_dir():
            raise ConfigError(f"{self._root}: there is neither a folder nor a tar file")

    def __len__(self) -> int:
        return len(self._names)

    def read(self, number: int) -> Screen:
        name = self._names[number]
        where = f"{self._root}, {name}"
        try:
            raw = (
                (self._root / f"{name}.json").read_bytes()
                if self._contents is None
                else self._contents[name]
            )
        except (OSError, KeyError) as error:
            raise BadSample("missing view hierarchy", where) from error
        try:
            hierarchy = parse_json(raw)
        except (ValueError, RecursionError) as error:
            raise BadSample("damaged view hierarchy", f"{where} ({error})") from error
        return read_screen(hierarchy, where, self._captions[name], self._nodes)


def _captions(file: Path) -> dict[str, dict[str, Sequence[str]]]:
    rows = csv.DictReader(io.StringIO(_text(file), newline=""))
    if missing := {"screenId", "nodeId", "captions"} - set(rows.fieldnames or ()):
        raise ConfigError(f"{file}: has no column {', '.join(sorted(missing))}")
    captions: dict[str, dict[str, Sequence[str]]] = {}
    for row in rows:
        if row["captions"] is None:
            raise ConfigError(f"{file}, line {rows.line_num}: too few columns")
        captions.setdefault(row["screenId"], {})[row["nodeId"]] = row["captions"].split("|")
    return captions


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from error


def _from_tar(file: Path, names: set[str]) -> dict[str, bytes]:
    def is_listed(name: PurePosixPath) -> bool:
        return name.suffix == ".json" and name.stem in names

    return {name.stem: content for name, content in stored_files(file, is_listed)}


# Texts of widgets in memory, most of which come again and again.
_TEXT_CACHE_SIZE = 50_000


class WidgetText:
    """Widgets' texts and captions as ids, and ids as captions.

    Args:
        max_words: length of a text's row.
        max_caption: word pieces of a caption; its row has [CLS] and [SEP] as well.
    """

    def __init__(self, tokenizer: Tokenizer, max_words: int, max_caption: int) -> None:
        self._tokenizer = tokenizer
        self._words = TextProcessor(tokenizer, max_words + 2)
        self._captions = TextProcessor(tokenizer, max_caption + 2)
        self._ids: dict[str, Tensor] = {}
        self.max_words, self.max_caption = max_words, max_caption
        self.vocab_size = self._words.vocab_size
        self.pad_id, self.cls_id, self.sep_id = (
            self._words.pad_id,
            self._words.cls_id,
            self._words.sep_id,
        )
        self.special_ids = self._words.special_ids

    def words(self, text: str) -> Tensor:
        """Return a text's ids (max_words,) int64 without special tokens."""
        if text not in self._ids:
            if len(self._ids) == _TEXT_CACHE_SIZE:
                self._ids.clear()
            tokens = self._words([text])
            ids = tokens.text_ids[tokens.word_mask]
            row = torch.full((self.max_words,), self.pad_id)
            row[: len(ids)] = ids
            self._ids[text] = row
        return self._ids[text]

    def caption(self, text: str) -> Tensor:
        """Return a caption's ids (max_caption + 2,) int64: [CLS], word pieces, [SEP], padding."""
        return self._captions([text]).text_ids[0]

    def sentence(self, ids: Sequence[int]) -> str:
        """Return the caption that ids stand for, up to the first [SEP]."""
        tokens = list(ids)
        tokens = tokens[: tokens.index(self.sep_id)] if self.sep_id in tokens else tokens
        sentence: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return sentence

    def to_json(self) -> str:
        """Return the tokenizer, for a model folder."""
        text: str = self._tokenizer.to_str()
        return text


def widget_text(
    screens: Screens, vocabulary: str | None, size: int, max_words: int, max_caption: int
) -> WidgetText:
    """Return a public vocabulary, or train one of at most `size` tokens on `screens`."""
    if vocabulary is not None:
        tokenizer = TextProcessor.load(vocabulary, max_words + 2).tokenizer
    else:
        tokenizer = train_wordpiece(_texts(screens), size)
    return WidgetText(tokenizer, max_words, max_caption)


def _texts(screens: Screens) -> Iterator[str]:
    for number in range(len(screens)):
        try:
            screen = screens.read(number)
        except BadSample:  # counted when it is trained on
            continue
        for widget in screen.widgets:
            yield widget.text
            yield widget.resource
        for captions in screen.captions.values():
            yield from captions


def read_tokenizer(text: str) -> Tokenizer:
    """Return the tokenizer of `WidgetText.to_json`."""
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"the stored tokenizer cannot be read ({error})") from error


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
    """B screens of W widgets, T captions of L tokens; empty rows if all are bad."""

    # (B, W, 4) float32: x0, y0, x1, y1 in shares of the screen
    boxes: Tensor
    # (B, W) int64
    kinds: Tensor
    clickable: Tensor
    # (B, W, N) int64, word pieces of the text and of the resource id
    words: Tensor
    resources: Tensor
    # (B, W, 3) int64, see `Widget`
    trees: Tensor
    # (B, W) bool, False is padding
    real: Tensor
    # (T, 2) int64, screen and widget of each caption
    targets: Tensor
    # (T, L) int64, [CLS] ... [SEP] [PAD]
    captions: Tensor
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> WidgetBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


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
    screen: Screen, text: WidgetText, targets: Sequence[tuple[int, str]], max_widgets: int
) -> EncodedScreen:
    """Return a screen's tensors.

    Args:
        targets: number of a widget, and its caption; may be repeated.
        max_widgets: limit: widgets with a caption stay, then the first in pre-order.
    """
    captioned = dict.fromkeys(number for number, _ in targets)
    if not screen.widgets or len(captioned) > max_widgets:
        raise BadSample("no widgets" if not screen.widgets else "too many widgets", screen.name)
    others = [number for number in range(len(screen.widgets)) if number not in captioned]
    selected = sorted([*captioned, *others[: max_widgets - len(captioned)]])
    rows = {number: row for row, number in enumerate(selected)}
    widgets = [screen.widgets[number] for number in selected]
    return EncodedScreen(
        torch.tensor([widget.box for widget in widgets], dtype=torch.float32),
        torch.tensor([widget.kind for widget in widgets]),
        torch.tensor([int(widget.clickable) for widget in widgets]),
        torch.stack([text.words(widget.text) for widget in widgets]),
        torch.stack([text.words(widget.resource) for widget in widgets]),
        torch.tensor([widget.tree for widget in widgets]),
        torch.tensor([rows[number] for number, _ in targets], dtype=torch.int64),
        torch.stack([text.caption(caption) for _, caption in targets])
        if targets
        else torch.zeros(0, text.max_caption + 2, dtype=torch.int64),
    )


class WidgetSamples:
    """Encodes one training screen, with some of its widgets and one caption of each."""

    def __init__(self, screens: Screens, text: WidgetText, config: WidgetDataConfig) -> None:
        self.screens, self.text, self.config = screens, text, config

    def __len__(self) -> int:
        return len(self.screens)

    def __call__(self, number: int, rng_for: RngFactory) -> EncodedScreen:
        """Read and encode screen `number`."""
        screen = self.screens.read(number)
        if not screen.captions:
            raise BadSample("no captions", screen.name)
        limit = min(self.config.max_targets, self.config.max_widgets)
        order = rng_for("widgets").permutation(list(screen.captions)).tolist()[:limit]
        rng = rng_for("caption")
        targets = [(widget, str(rng.choice(screen.captions[widget]))) for widget in order]
        return encode_screen(screen, self.text, targets, self.config.max_widgets)


def widget_data(
    screens: Screens, text: WidgetText, config: WidgetDataConfig, batch: int, seed: int
) -> OrderedData:
    """Return the training batches of screens."""
    samples = WidgetSamples(screens, text, config)
    return indexed_data(len(samples), samples, Collate(text), config, batch, seed)


# A class, so that spawned workers can have it.
class Collate:
    """Screens of several sizes to one batch."""

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
        # A rank with empty rows alone has to run the same model as the others.
        zero = torch.zeros(1, dtype=torch.int64)
        words = torch.full((1, self._words), self._pad)
        caption = torch.full((1, self._caption), self._pad)
        return EncodedScreen(
            torch.zeros(1, 4), zero, zero, words, words, torch.zeros(1, 3).long(), zero, caption
        )
