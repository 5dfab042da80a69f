"""The site of the documentation works from the disk: relative links, a search without a server."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("material")  # of the extra `docs`
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def test_links_and_search_need_no_server(tmp_path):
    pages = {"index.md": "[here](how-to/page.md)", "how-to/page.md": "[back](../index.md)"}
    (tmp_path / "docs/how-to").mkdir(parents=True)
    (tmp_path / "docs/assets").mkdir()
    shutil.copy(ROOT / "docs/assets/iframe-worker.js", tmp_path / "docs/assets")
    for name, text in pages.items():
        (tmp_path / "docs" / name).write_text(f"# Title\n\n{text}")
    folders = {"docs_dir": str(tmp_path / "docs"), "site_dir": str(tmp_path / "site")}
    nav = [{"Home": "index.md"}, {"Page": "how-to/page.md"}]
    config = load_config(str(ROOT / "mkdocs.yml"), hooks=[], nav=nav, **folders)
    build(config)
    for name in ("index.html", "how-to/page.html"):
        html = (tmp_path / "site" / name).read_text()
        assert not re.findall(r'src="https?:', html)
        links = re.findall(r'(?:href|src)="(?!https?:|#)([^"]*)"', html)
        assert len(links) > 5
        for link in links:
            assert not link.startswith("/")
            assert (tmp_path / "site" / name).parent.joinpath(link).exists(), link
    assert (tmp_path / "site/search/search_index.js").is_file()
    if shutil.which("node"):
        found = run_search(tmp_path / "site", "back")
        assert [item["location"] for item in found["items"][0]] == ["how-to/page.html"]


# A page from the disk, as far as the search needs it: frames are contexts of node:vm.
SEARCH = """
const vm = require("vm"), fs = require("fs"), [site, query] = process.argv.slice(2)
const worker = fs.readdirSync(site + "/assets/javascripts/workers").find(n => n.endsWith(".js"))
const read = file => fs.readFileSync(file, "utf8")
const createFrame = () => {
  const events = new EventTarget(), scope = vm.createContext({
    MessageEvent, console, setTimeout, dispatchEvent: e => events.dispatchEvent(e),
    addEventListener: (type, listener) => events.addEventListener(type, listener),
  })
  scope.self = scope.window = scope
  const append = script => { vm.runInContext(read(new URL(script.src)), scope); script.onload() }
  const change = { open() {}, write() {}, close() {} }
  scope.document = { ...change, createElement: () => ({}), body: { append } }
  return { contentWindow: scope }
}
const page = vm.createContext({
  EventTarget, MessageEvent, URL, Promise,
  document: { createElement: createFrame, body: { append() {} } },
  location: { protocol: "file:", href: "file://" + site + "/index.html" },
})
page.window = page
vm.runInContext(read(site + "/assets/iframe-worker.js"), page)
const search = new page.Worker("assets/javascripts/workers/" + worker)
search.addEventListener("message", ({ data }) => {
  if (data.type === 1) search.postMessage({ type: 2, data: query })
  if (data.type === 3) console.log(JSON.stringify(data.data))
})
const index = JSON.parse(read(site + "/search/search_index.json"))
search.postMessage({ type: 0, data: { ...index, options: { suggest: false } } })
"""


def run_search(site, query):
    """Answer a query by the site's own scripts, as a browser does for a page from the disk."""
    ran = subprocess.run(
        ["node", "-", str(site), query], input=SEARCH, capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout)
