"""Screens with captioned widgets, Rico's or generated, as batches."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vlp.config import Config, ConfigError
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.tar import read_files
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import MapDatasetConfig, RngFactory, warn_of_training_data
from vlp.data.stream.rng import make_rng
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.io import parse_json
from vlp.tasks.widgets.screens import Nodes, Screen, generate_screen, read_screen

Part = Literal["train", "test"]

# Cached generated screens, about 10 KB each.
_CACHE_SIZE = 20_000

NodesField = Annotated[
    Nodes,
    Field(description="nodes of the view hierarchy to read; nodes with captions are always read"),
]


class GeneratedScreensConfig(Config):
    """Generated screens (`widgets.screens`) with disjoint random numbers per split."""

    kind: Literal["generated"] = Field("generated", description="selects this class")
    train: int = Field(2000, ge=1, description="number of screens to train on")
    test: int = Field(300, ge=1, description="number of screens to evaluate on")
    seed: int = Field(0, ge=0, description="of the corpus; all runs of a comparison share it")
    nodes: NodesField = "all"


class RicoScreensConfig(Config):
    """Rico's view hierarchies and the captions of Li et al. 2020 (google-research-datasets)."""

    kind: Literal["rico"] = Field("rico", description="selects this class")
    hierarchies: str = Field(description="folder or tar file of SCREEN.json")
    captions: str = Field(
        description="widget_captions.csv: screenId, nodeId, and captions separated by |"
    )
    train: str = Field(
        description="file of the screen ids to train on, one per line, such as split/train.txt"
    )
    test: str = Field(description="file of the screen ids to evaluate on")
    nodes: NodesField = "all"

    @model_validator(mode="after")
    def _warn_of_training_data(self) -> RicoScreensConfig:
        warn_of_training_data(self.train, self.test)
        return self


AnyScreensConfig = GeneratedScreensConfig | RicoScreensConfig


def open_screens(config: AnyScreensConfig, part: Part) -> Screens:
    """Open the screens to train on or to evaluate on."""
    if isinstance(config, GeneratedScreensConfig):
        return _GeneratedScreens(config, part)
    return _RicoScreens(config, part)


class _GeneratedScreens:
    def __init__(self, config: GeneratedScreensConfig, part: Part) -> None:
        self._config, self._part = config, part
        self._screens: dict[int, Screen] = {}

    def __len__(self) -> int:
        return self._config.train if self._part == "train" else self._config.test

    def read(self, number: int) -> Screen:
        if number in self._screens:
            return self._screens[number]
        rng = make_rng(self._config.seed, 0, number, f"{self._part} screen")
        hierarchy, captions = generate_screen(rng)
        screen = read_screen(hierarchy, f"{self._part} {number}", captions, self._config.nodes)
        if len(self._screens) < _CACHE_SIZE:
            self._screens[number] = screen
        return screen


class _RicoScreens:
    def __init__(self, config: RicoScreensConfig, part: Part) -> None:
        split = Path(config.train if part == "train" else config.test)
        captions = _read_captions(Path(config.captions))
        ids = [line.strip() for line in _read_text(split).split("\n") if line.strip()]
        self._names = [name for name in ids if name in captions]
        if not self._names:
            raise ConfigError(
                f"{config.captions} has captions for none of the {len(ids)} screens of {split}"
            )
        self._captions = {name: captions[name] for name in self._names}
        self._root, self._nodes = Path(config.hierarchies), config.nodes
        self._contents: Mapping[str, bytes] | None = None
        if self._root.is_file():
            self._contents = _read_tar(self._root, set(self._names))
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


# Screens by number, 0 to len - 1; `read` raises BadSample.
Screens = _GeneratedScreens | _RicoScreens


def _read_captions(file: Path) -> dict[str, dict[str, Sequence[str]]]:
    """Read captions by screen and node."""
    rows = csv.DictReader(io.StringIO(_read_text(file), newline=""))
    if missing := {"screenId", "nodeId", "captions"} - set(rows.fieldnames or ()):
        raise ConfigError(f"{file} has no column {', '.join(sorted(missing))}")
    captions: dict[str, dict[str, Sequence[str]]] = {}
    for row in rows:
        if row["captions"] is None:
            raise ConfigError(f"{file}, line {rows.line_num}: too few columns")
        captions.setdefault(row["screenId"], {})[row["nodeId"]] = row["captions"].split("|")
    return captions


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from error


def _read_tar(file: Path, names: set[str]) -> dict[str, bytes]:
    def is_listed(path: PurePosixPath) -> bool:
        return path.suffix == ".json" and path.stem in names

    return {path.stem: content for path, content in read_files(file, is_listed)}


# Texts of widgets with cached ids; most texts recur.
_TEXT_CACHE_SIZE = 50_000


class WidgetText:
    """Tokenizer of widgets' texts and captions, and decoder of captions.

    Args:
        max_words: largest number of word pieces of a text.
        max_caption: largest number of word pieces of a caption, without [CLS] and [SEP].
    """

    def __init__(self, tokenizer: Tokenizer, max_words: int, max_caption: int) -> None:
        self._tokenizer = tokenizer
        self._texts = text = TextProcessor(tokenizer, max_words + 2)
        self._captions = TextProcessor(tokenizer, max_caption + 2)
        self._ids: dict[str, Tensor] = {}
        self.max_words, self.max_caption = max_words, max_caption
        self.vocab_size, self.special_ids = text.vocab_size, text.special_ids
        self.pad_id, self.cls_id, self.sep_id = text.pad_id, text.cls_id, text.sep_id

    def text_ids(self, text: str) -> Tensor:
        """Return a text's ids (max_words,) int64: word pieces and padding."""
        if text not in self._ids:
            if len(self._ids) == _TEXT_CACHE_SIZE:
                self._ids.clear()
            tokens = self._texts([text])
            ids = tokens.text_ids[tokens.word_mask]
            self._ids[text] = torch.full((self.max_words,), self.pad_id)
            self._ids[text][: len(ids)] = ids
        return self._ids[text]

    def caption_ids(self, text: str) -> Tensor:
        """Return a caption's ids (max_caption + 2,) int64: [CLS], word pieces, [SEP], padding."""
        return self._captions([text]).text_ids[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids up to the first [SEP]."""
        tokens = list(takewhile(lambda token: token != self.sep_id, ids))
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def to_json(self) -> str:
        """Return the tokenizer as JSON, for a model folder."""
        return self._tokenizer.to_str()


def widget_text(
    screens: Screens, vocabulary: str | None, size: int, max_words: int, max_caption: int
) -> WidgetText:
    """Load the tokenizer `vocabulary`, or train one of at most `size` tokens on the screens."""
    if vocabulary is not None:
        tokenizer = TextProcessor.load(vocabulary, max_words + 2).tokenizer
    else:
        tokenizer = train_wordpiece(_texts(screens), size)
    return WidgetText(tokenizer, max_words, max_caption)


def _texts(screens: Screens) -> Iterator[str]:
    for number in range(len(screens)):
        try:
            screen = screens.read(number)
        except BadSample:  # training counts it
            continue
        for widget in screen.widgets:
            yield widget.text
            yield widget.resource
        for captions in screen.captions.values():
            yield from captions


def read_tokenizer(text: str) -> Tokenizer:
    """Read the result of `WidgetText.to_json`."""
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"the stored tokenizer cannot be read ({error})") from error


class WidgetDataConfig(MapDatasetConfig):
    """Screens, vocabulary, and maximum lengths; the public code has 10 word pieces everywhere."""

    screens: AnyScreensConfig = Field(
        GeneratedScreensConfig(), discriminator="kind", description="screens, by their `kind`"
    )
    vocabulary: str | None = Field(
        None,
        description="folder or hub name of a BERT tokenizer; null: one is trained on the screens",
        json_schema_extra={"resume": "path"},
    )
    vocabulary_size: int = Field(10_000, ge=6, description="tokens of a trained vocabulary")
    max_words: int = Field(
        10, ge=1, description="word pieces of a widget's text, and of its resource id, at most"
    )
    max_caption: int = Field(10, ge=1, description="word pieces of a caption at most")
    max_widgets: int = Field(
        250, ge=1, description="widgets of a screen at most; widgets with captions come first"
    )
    max_targets: int = Field(8, ge=1, description="widgets captioned per screen and visit at most")


class WidgetBatch(NamedTuple):
    """B screens of W widgets, T captions of L tokens; a blank screen if all samples are bad."""

    # (B, W, 4) float32: x0, y0, x1, y1 as shares of the screen
    boxes: Tensor
    # (B, W) int64, index in `KINDS`
    kinds: Tensor
    # (B, W) int64, 1 = clickable
    clickable: Tensor
    # (B, W, N) int64, word pieces of the text
    words: Tensor
    # (B, W, N) int64, word pieces of the resource id
    resources: Tensor
    # (B, W, 3) int64, see `Widget`
    trees: Tensor
    # (B, W) bool, False = padding
    widget_mask: Tensor
    # (T, 2) int64, row and widget of each caption
    targets: Tensor
    # (T, L) int64, [CLS] ... [SEP] and padding
    captions: Tensor
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> WidgetBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


class EncodedScreen(NamedTuple):
    """One screen of a `WidgetBatch`; `targets` are (T,), the widgets of the captions."""

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
    """Return a screen's tensors; raises BadSample.

    Args:
        targets: numbers of widgets with a caption each; numbers may recur.
        max_widgets: largest number of widgets; widgets of `targets` come first, then pre-order.
    """
    captioned = {number for number, _ in targets}
    if not screen.widgets or len(captioned) > max_widgets:
        raise BadSample("no widgets" if not screen.widgets else "too many widgets", screen.name)
    others = [number for number in range(len(screen.widgets)) if number not in captioned]
    numbers = sorted([*captioned, *others[: max_widgets - len(captioned)]])
    rows = {number: row for row, number in enumerate(numbers)}
    widgets = [screen.widgets[number] for number in numbers]
    return EncodedScreen(
        torch.tensor([widget.box for widget in widgets], dtype=torch.float32),
        torch.tensor([widget.kind for widget in widgets]),
        torch.tensor([int(widget.clickable) for widget in widgets]),
        torch.stack([text.text_ids(widget.text) for widget in widgets]),
        torch.stack([text.text_ids(widget.resource) for widget in widgets]),
        torch.tensor([widget.tree for widget in widgets]),
        torch.tensor([rows[number] for number, _ in targets], dtype=torch.int64),
        torch.stack([text.caption_ids(caption) for _, caption in targets])
        if targets
        else torch.zeros(0, text.max_caption + 2, dtype=torch.int64),
    )


class WidgetSamples:
    """Training samples: screens with a random caption of some random widgets."""

    def __init__(self, screens: Screens, text: WidgetText, config: WidgetDataConfig) -> None:
        self.screens, self.text, self.config = screens, text, config

    def __call__(self, number: int, rng_for: RngFactory) -> EncodedScreen:
        """Read and encode screen `number`; raises BadSample."""
        screen = self.screens.read(number)
        if not screen.captions:
            raise BadSample("no captions", screen.name)
        limit = min(self.config.max_targets, self.config.max_widgets)
        order = rng_for("widgets").permutation(list(screen.captions)).tolist()[:limit]
        rng = rng_for("caption")
        targets = [(widget, str(rng.choice(screen.captions[widget]))) for widget in order]
        return encode_screen(screen, self.text, targets, self.config.max_widgets)


class Collate:
    """Collation of screens to a batch; a class, to be picklable."""

    def __init__(self, text: WidgetText) -> None:
        self._pad, self._words, self._caption = text.pad_id, text.max_words, text.max_caption + 2

    def __call__(
        self, screens: Sequence[EncodedScreen], skipped: tuple[SkippedSample, ...] = ()
    ) -> WidgetBatch:
        """Pad screens to the largest number of widgets."""
        valid = torch.ones(len(screens), dtype=torch.bool)
        if not screens:
            screens, valid = [self._blank()], torch.zeros(1, dtype=torch.bool)

        def stack_padded(name: str, padding: int = 0) -> Tensor:
            parts = [getattr(screen, name) for screen in screens]
            return pad_sequence(parts, batch_first=True, padding_value=padding)

        counts = torch.tensor([len(screen.boxes) for screen in screens])
        targets = [
            torch.stack([torch.full_like(screen.targets, row), screen.targets], -1)
            for row, screen in enumerate(screens)
        ]
        return WidgetBatch(
            stack_padded("boxes"),
            stack_padded("kinds"),
            stack_padded("clickable"),
            stack_padded("words", self._pad),
            stack_padded("resources", self._pad),
            stack_padded("trees"),
            torch.arange(int(counts.max())) < counts[:, None],
            torch.cat(targets),
            torch.cat([screen.captions for screen in screens]),
            valid,
            skipped,
        )

    def _blank(self) -> EncodedScreen:
        # A rank without a good sample has to run the same model as the others.
        zero = torch.zeros(1, dtype=torch.int64)
        words = torch.full((1, self._words), self._pad)
        caption = torch.full((1, self._caption), self._pad)
        return EncodedScreen(
            torch.zeros(1, 4), zero, zero, words, words, torch.zeros(1, 3).long(), zero, caption
        )
