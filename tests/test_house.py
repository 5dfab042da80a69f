"""The house rules that no linter knows: citations of the papers' open questions resolve."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ROOT / "docs" / "explanation" / "papers.md"
TREES = ("vlp", "data_tools", "evaluation", "launch", "tests", "configs", "docs")
CITATION = re.compile(r"papers\.md((?:[\s#\"]*#[a-z0-9-]+(?:,| and| to)?)+)")


def sources(*suffixes: str) -> list[Path]:
    files = (path for tree in TREES for path in (ROOT / tree).rglob("*"))
    return sorted(path for path in files if path.suffix in suffixes)


def test_every_citation_of_a_paper_has_its_anchor():
    anchors = set(re.findall(r'<a id="([a-z0-9-]+)"></a>', PAPERS.read_text()))
    cited: dict[str, list[str]] = {}
    for path in sources(".py", ".yaml", ".md"):
        for citation in CITATION.findall(path.read_text()):
            for anchor in re.findall(r"#([a-z]+(?:-[a-z0-9]+)*)", citation):
                cited.setdefault(anchor, []).append(str(path.relative_to(ROOT)))
    assert len(cited) > 60
    assert {anchor: files for anchor, files in cited.items() if anchor not in anchors} == {}


def test_no_choice_is_cited_without_its_paper():
    number = re.compile(r"\b[Rr]eadings? [AFISV]\d")
    found = [
        str(path.relative_to(ROOT))
        for path in sources(".py", ".yaml", ".md")
        if number.search(path.read_text())
    ]
    assert found == []


def test_anchors_are_unique():
    anchors = re.findall(r'<a id="([a-z0-9-]+)"></a>', PAPERS.read_text())
    assert len(anchors) == len(set(anchors)) > 90
