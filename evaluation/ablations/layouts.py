"""Layouts of an ablation's tables: which figures are columns, and which are tested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from evaluation.ablations.config import TableConfig
from evaluation.ablations.runs import Results

SWAPS = "swaps/{view}/{scorer}/all/pair"
"""The figure that gates and tests look at: right comparisons of the cross-modal encoder."""

SPREAD = "paths/spread"
"""The one figure that is no percentage: patches and tokens."""

RECALL = ("rerank/text_to_image/R@1", "rerank/image_to_text/R@1")
"""Figures that the paper compares; differences are those of the mean of both."""

COLUMNS = {
    "place": "swaps/{view}/{scorer}/place/pair",
    "relation": "swaps/{view}/{scorer}/relation/pair",
    "order": "swaps/{view}/{scorer}/order/pair",
    "binding": "swaps/{view}/{scorer}/binding/pair",
    "distance": "swaps/{view}/{scorer}/distance/pair",
    "all swaps": SWAPS,
    "group": "swaps/{view}/{scorer}/all/group",
    "ITM": "swaps/{view}/match/all/pair",
    "R@1 t→i": RECALL[0],
    "R@1 i→t": RECALL[1],
}
SCORERS = {
    "match": "image-text matching",
    "words": "the likelihood of the masked words (ITM: by image-text matching)",
}
_SEEDS = "Ours: percent, mean ± standard deviation over seeds; "


class Layout(NamedTuple):
    """Columns, tests and notes of a table.

    columns: figures by their headings. tested: headings of the differences, each of the mean of
    some figures; `detectable` speaks of the first. note: explains the columns. detectable: the
    smallest difference that was found to be detectable. all_columns: also those without a figure.
    """

    columns: Mapping[str, str]
    tested: Mapping[str, tuple[str, ...]]
    note: str
    detectable: str = (
        "Differences of {first} varied by {typical} points between seeds: {least} points are what "
        "{seeds} seeds can detect."
    )
    all_columns: bool = False

    def heads(self, results: Results, scorer: str) -> dict[str, str]:
        """Return the columns that any result has: a corpus of single objects swaps places alone."""
        if self.all_columns:
            return dict(self.columns)
        known = {name for result in results.values() for name in result["figures"]}
        wanted = {head: name.replace("{scorer}", scorer) for head, name in self.columns.items()}
        if scorer == "match":
            wanted.pop("ITM", None)  # the other columns are its own
        return {head: name for head, name in wanted.items() if name.format(view="image") in known}


LAYOUTS = {
    "swaps": Layout(
        COLUMNS,
        {"all swaps": (SWAPS,), "R@1": RECALL},
        _SEEDS + "swaps: right comparisons, chance 50 (group: 16.7), by {scorer}; R@1 re-ranked, "
        "held-out scenes, its differences those of the mean of both directions; p by a paired "
        "t-test.",
    ),
    "anchors": Layout(
        {
            "R@1 t→i": "dual/text_to_image/R@1",
            "R@1 i→t": "dual/image_to_text/R@1",
            "colour words": "pointing/colour",
            "shape words": "pointing/shape",
            "anchors in box: colour": "anchors/colour",
            "shape": "anchors/shape",
            "anchors": "paths/anchors",
            "reachable": "paths/reachable",
            "spread": SPREAD,
        },
        {
            "colour words": ("pointing/colour",),
            "R@1": ("dual/text_to_image/R@1", "dual/image_to_text/R@1"),
        },
        _SEEDS + "words: whose most similar patch lies in their object's box; anchors in box: of "
        "a word's anchors; anchors and reachable: of all patches and words; spread: standard "
        "deviation of a word's paths, in patches and tokens; R@1: of the dual encoder, held-out "
        "scenes, its differences those of the mean of both directions; p by a paired t-test.",
    ),
}


def layout_of(table: TableConfig) -> Layout:
    """Return the layout that a table names, or that its own figures make."""
    if not table.figures:
        return LAYOUTS[table.about]
    first = next(iter(table.figures.values()))
    return Layout(
        table.figures,
        table.tested or {"": (first,)},
        "Ours: mean ± standard deviation over seeds; a difference without a name is that of the "
        "first column; paired by seed, with a two-sided t-test.",
        "Differences varied by {typical} between seeds: {least} is what {seeds} seeds can detect.",
        all_columns=True,
    )
