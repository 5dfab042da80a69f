"""Citations of the papers' open questions lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from product import ROOT

PAPERS = ROOT / "docs" / "explanation" / "papers.md"
TREES = ("vlp", "data_tools", "evaluation", "launch", "tests", "configs", "docs")
CITATION = re.compile(r"papers\.md((?:[\s#\"]*#[a-z0-9-]+(?:,| and| to)?)+)")


def sources() -> list[Path]:
    files = (path for tree in TREES for path in (ROOT / tree).rglob("*"))
    return sorted(path for path in files if path.suffix in (".py", ".yaml", ".md"))


def anchors() -> list[str]:
    return re.findall(r'<a id="([a-z0-9-]+)"></a>', PAPERS.read_text())


def test_every_cited_anchor_exists():
    cited: dict[str, list[str]] = {}
    for path in sources():
        for citation in CITATION.findall(path.read_text()):
            for anchor in re.findall(r"#([a-z]+(?:-[a-z0-9]+)*)", citation):
                cited.setdefault(anchor, []).append(str(path.relative_to(ROOT)))
    assert len(cited) > 60
    known = anchors()
    assert {anchor: files for anchor, files in cited.items() if anchor not in known} == {}


def test_anchors_are_unique():
    assert len(anchors()) == len(set(anchors())) > 90
