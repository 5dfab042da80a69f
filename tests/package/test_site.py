"""The site of the documentation works from the disk: relative links, a search without a server."""

import re
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def test_links_and_search_need_no_server(tmp_path):
    pages = {"index.md": "[here](how-to/page.md)", "how-to/page.md": "[back](../index.md)"}
    (tmp_path / "docs/how-to").mkdir(parents=True)
    for name, text in pages.items():
        (tmp_path / "docs" / name).write_text(f"# Title\n\n{text}")
    folders = {"docs_dir": str(tmp_path / "docs"), "site_dir": str(tmp_path / "site")}
    nav = [{"Home": "index.md"}, {"Page": "how-to/page.md"}]
    config = load_config(str(ROOT / "mkdocs.yml"), hooks=[], nav=nav, **folders)
    build(config)
    for name in ("index.html", "how-to/page.html"):
        html = (tmp_path / "site" / name).read_text()
        links = re.findall(r'(?:href|src)="(?!https?:|#)([^"]*)"', html)
        assert len(links) > 5
        for link in links:
            assert not link.startswith("/")
            assert (tmp_path / "site" / name).parent.joinpath(link).exists(), link
    assert (tmp_path / "site/search/search_index.js").is_file()
