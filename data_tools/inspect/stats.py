"""Say what shards hold: captions and their lengths, images and their sizes, sources, repetitions.

    python -m data_tools stats shards/cc3m shards/sbu --out stats.json
    python -m data_tools stats shards/cc3m --out stats.json --vocabulary bert-base-uncased \\
        --max-tokens 30

Writes FILE and, beside it, the histograms as an image (.png). Words are runs of letters and digits
in lower case; with `--vocabulary` captions are counted in its tokens too, [CLS] and [SEP]
included. Of images the headers are read; `verify` decodes them. Interrupted, it writes what was
counted so far and says so; run again, it counts the rest. Memory is bounded: the names of a
billion samples are compared on disk (in TMPDIR, 16 bytes a sample).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_tools.executor.executor import open_ledger
from data_tools.executor.options import add_executor, executor_of
from data_tools.inspect.shard_stats import ShardTally, Tally, joined, tally_shard
from data_tools.scan.repeated_ids import RepeatedIds
from data_tools.scan.shard_reader import Shard, ShardReader, scan, shards_of
from vlp.config import ConfigError
from vlp.io import atomic_write, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folder of shards")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON to write")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=30,
        metavar="N",
        help="count captions of more tokens, or of more words without --vocabulary (default 30)",
    )
    parser.add_argument("--vocabulary", help="folder with tokenizer.json, or a name on the hub")
    add_executor(parser)


def run(arguments: argparse.Namespace) -> int:
    """Count, write both files and print the main numbers; damage is counted, and no failure."""
    if arguments.out.suffix == ".png":
        raise ConfigError(f"--out {arguments.out}: the image is written beside a .json file")
    shards_of(arguments.folders)
    if arguments.vocabulary is not None:
        _tokens(arguments.vocabulary)
    count = _Count(arguments)
    try:
        with open_ledger(arguments.out.with_name(f"{arguments.out.name}.tasks")) as ledger:
            for folder in arguments.folders:
                count.folder(folder, ledger)
    except KeyboardInterrupt:
        count.write(complete=False)
        print(f"\n{arguments.out}: what was counted before the interruption")
        raise
    summary = count.write(complete=True)
    print_summary(summary)
    print(f"{arguments.out} and {arguments.out.with_suffix('.png').name} tell more")
    return 0


def print_summary(summary: dict[str, Any]) -> None:
    """Print the main numbers of a summary."""
    samples = summary["samples"]
    without = summary["samples without caption"]
    print(
        f"{samples} samples in {summary['shards']} shards, {summary['captions']} captions, "
        f"{summary['images']} images of {summary['bytes of images'] / 1e6:.1f} MB"
    )
    print(f"  without caption: {without} ({without / max(samples, 1):.1%})")
    longer = summary["captions that are too long"]
    print(f"  of more than {summary['limit']}: {longer} captions")
    for name, quantity in summary["quantities"].items():
        percentiles = quantity["percentiles"]
        low, middle, high = (percentiles[share] for share in ("5", "50", "95"))
        print(f"  {name}: {low:g} to {high:g}, median {middle:g} {quantity['unit']}")
    print(f"  different words: {summary['vocabulary size']}")
    for what in ("formats", "sources", "bad samples"):
        shown = list(summary[what].items())
        more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
        print(f"  {what}: {', '.join(f'{name} {count}' for name, count in shown[:8])}{more}")
    repeated = summary["repeated"]
    print(
        f"  keys that a folder has more than once: {repeated['keys']}; images (source and "
        f"image_id) of more than one sample: {repeated['images']} of {repeated['named images']}"
    )


class _Count:
    """Counts of all shards so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments, self._executor = arguments, executor_of(arguments)
        self._tally = Tally()
        self._names, self._words = RepeatedIds(), RepeatedIds()
        self._repeated_keys = self._shards = 0

    def folder(self, folder: Path, ledger: Path) -> None:
        """Count the shards of a folder, of which the ledger may know some."""
        arguments = self._arguments
        work = partial(_tally, vocabulary=arguments.vocabulary, limit=arguments.max_tokens)
        keys = RepeatedIds()
        shards = shards_of([folder])
        title = f"stats {folder}"
        for _, found in scan(work, shards, self._executor, title, join=joined, ledger=ledger):
            self._shards += found.shards
            self._tally.add(found.tally)
            self._names.add(found.names)
            self._words.add(found.words)
            keys.add(found.keys)
        self._repeated_keys += len(keys.result().values)

    def write(self, complete: bool) -> dict[str, Any]:
        """Write the JSON and the image; returns what the JSON holds."""
        names = self._names.result()
        unit = "words" if self._arguments.vocabulary is None else "tokens"
        counted = ("samples", "captions", "images", "bytes of images")
        counts = (*counted, "samples without caption", "captions that are too long")
        summary = {
            "folders": [str(folder) for folder in self._arguments.folders],
            "complete": complete,
            "shards": self._shards,
            "limit": f"{self._arguments.max_tokens} {unit}",
            **dict.fromkeys(counts, 0),
            **self._tally.summary(),
            "vocabulary size": self._words.result().distinct,
            "repeated": {
                "keys": self._repeated_keys,
                "named images": names.distinct,
                "images": len(names.values),
            },
        }
        out: Path = self._arguments.out
        write_json(out, summary, indent=1, error=ConfigError, ensure_ascii=False)
        draw(summary, out.with_suffix(".png"))
        return summary


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw the histograms of a summary, and bars of its formats and sources."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    quantities = summary["quantities"]
    columns = 3
    rows = -(-(len(quantities) + 2) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows))
    FigureCanvasAgg(figure)
    edge = 0.5 / figure.get_figheight()
    figure.subplots_adjust(0.06, edge, 0.98, 1 - 1.2 * edge, 0.25, 0.55)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, (name, quantity) in zip(panels, quantities.items()):
        _draw_histogram(panel, quantity["histogram"], quantity["unit"])
        panel.set_title(f"{name} (median {quantity['percentiles']['50']:g})", fontsize=10)
        panel.set_xlabel(quantity["unit"], fontsize=8)
    for panel, name in zip(panels[len(quantities) :], ("formats", "sources")):
        _draw_bars(panel, summary[name])
        panel.set_title(name, fontsize=10)
    for panel in panels:
        panel.tick_params(labelsize=8)
        panel.set_visible(panel.has_data())
    figure.suptitle(f"{summary['samples']} samples", fontsize=11)
    with atomic_write(path, error=ConfigError) as file:
        figure.savefig(file, dpi=110, format="png")


def _draw_histogram(panel: Axes, histogram: Sequence[tuple[float, int]], unit: str) -> None:
    """Draw bars over all values but the topmost thousandth, which would squeeze the others."""
    from matplotlib.ticker import MaxNLocator, NullFormatter

    values, counts = (np.array(column, dtype=float) for column in zip(*histogram))
    end = values[np.searchsorted(np.cumsum(counts), 0.999 * counts.sum())]
    if unit == "bytes":
        positive = values[values > 0]
        start = positive[0] if len(positive) else 1.0
        edges = np.geomspace(start, max(end, 2 * start), _BARS + 1)
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter(NullFormatter())
    elif (values % 1 == 0).all():
        step = max(-(-(end - values[0] + 1) // _BARS), 1)
        edges = np.arange(values[0], end + step + 1, step) - 0.5
        panel.set_xlim(edges[0] - step, edges[-1] + step)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    else:
        edges = np.linspace(values[0], max(end, values[0] + 0.1), _BARS + 1)
    shown = values.clip(edges[0], end)
    panel.hist(shown, bins=list(edges), weights=counts, color="#4878a8")


def _draw_bars(panel: Axes, counts: dict[str, int]) -> None:
    shown = list(counts.items())[:8][::-1]
    names = [name if len(name) <= 24 else f"{name[:23]}…" for name, _ in shown]
    panel.barh(range(len(shown)), [count for _, count in shown], height=0.7, color="#a8c4de")
    panel.set_ylim(-1, max(len(shown), 4))
    # The names stand on the bars: beside them, a long one would run into the next panel.
    panel.set_yticks([])
    for place, name in enumerate(names):
        panel.text(0.02, place, name, transform=panel.get_yaxis_transform(), fontsize=8,
                   va="center", parse_math=False)  # fmt: skip


def _tally(shard: Shard, vocabulary: str | None, limit: int) -> ShardTally:
    with ShardReader(shard.path) as opened:
        return tally_shard(opened, None if vocabulary is None else _tokens(vocabulary), limit)


@cache
def _tokens(vocabulary: str) -> Callable[[str], int]:
    # Imported here: it brings torch along, which counting words does not need.
    from vlp.data.text.tokenizer import TextProcessor

    tokenizer = TextProcessor.load(vocabulary, max_tokens=512).tokenizer
    return lambda caption: len(tokenizer.encode(caption).ids)
