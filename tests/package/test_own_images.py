"""300 own images in each of ten forms, by the page's commands: shards, training, table, page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import own_forms
import pytest
from fenced_commands import commands, run_all
from own_forms import TEN

PAGE = "docs/get-started/own-data.md"
FORMS = [form.__name__ for form in TEN]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="Gradio is missing"),
]


def chain() -> list[list[str]]:
    """The import of the first section, then all that trains from nothing."""
    imports = [one for one in commands(PAGE) if one[:4] == ["vlp", "data", "import", "photos/"]]
    return [*imports, *commands(PAGE, "Train from nothing")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of every command, with each form in place of `photos/`."""
    wanted = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(own_forms, "COUNT", 300)
        for form in TEN:
            place = form(tmp_path_factory.mktemp(form.__name__))
            (first, *rest) = chain()
            wanted[form.__name__] = [[*first[:3], *place, *first[4:]], *rest]
    return run_all(wanted, Path(tmp_path_factory.mktemp("commands")), timeout=1500)


def test_the_page_leads_from_images_to_the_page() -> None:
    told = [" ".join(one[1:3]) for one in chain()]
    assert [one.partition(" --")[0] for one in told] == [
        "data import",
        "data vocabulary",
        "train",
        "evaluate retrieval",
        "app",
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_ends_on_the_page(form: str, results: list[dict[str, Any]]) -> None:
    made = [one for one in results if one["page"] == form]
    for one in made:
        assert one["code"] == 0, f"{one['command']}: {one['said']}"
    imported, _, _, table, shown = (one["said"] for one in made)
    assert "300 images" in imported
    assert "R@1" in table
    assert "R@10" in table
    assert "'label': 'matches', 'confidence'" in shown
    assert re.search(r"^search 8$", shown, re.MULTILINE)
