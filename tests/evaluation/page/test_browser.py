import shutil
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image
from question_shards import AUGMENT, toy_parts

from evaluation.page.gradio_page import serve
from evaluation.page.session import ModelSession
from vlp.tasks.vqa import task as vqa
from vlp.training.engines.environment import free_port

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("gradio")

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
ANSWERS = {
    "Search": ".results img",
    "Ask": "[data-testid=label-output-value]",
    "Match": "[data-testid=label-output-value]",
    "Ground": ".image-frame img",
    "Anchors": ".words img",
}
"""What an answer consists of, by tab."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (`chromium`)"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory, scene_shards):
    folder = tmp_path_factory.mktemp("served") / "model"
    data = {"train": [str(scene_shards)], "augment": AUGMENT, "max_answer": 6}
    config = vqa.VqaConfig.model_validate({"data": data, "decoder": {"layers": 1}})
    task, _ = vqa.build(config, toy_parts(seed=3), 8, 0, "float32")
    task.save_model(folder, task.state_dict())
    port = free_port()
    session = ModelSession(folder, [scene_shards], device="cpu")
    blocks = serve(session, "127.0.0.1", port, block=False)
    yield f"http://127.0.0.1:{port}"
    blocks.close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as engine:
        started = engine.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture(params=SIZES)
def seen(request, browser, address):
    width, height = SIZES[request.param]
    page = browser.new_page(viewport={"width": width, "height": height})
    wrong, hosts = [], set()
    page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    page.goto(address)
    page.get_by_role("tab").first.wait_for()
    yield page
    page.close()
    assert wrong == []
    assert hosts <= {"127.0.0.1", None}, "the page fetches nothing from elsewhere"


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def test_one_click_on_an_example_answers_in_every_tab(seen):
    assert [tab.inner_text() for tab in seen.get_by_role("tab").all()] == list(ANSWERS)
    assert overflow(seen) <= 0
    chosen = set()
    for tab, answer in ANSWERS.items():
        seen.get_by_role("tab", name=tab).click()
        panel = seen.get_by_role("tabpanel").filter(visible=True)
        assert panel.locator("textarea").input_value(), "the page opens with a text"
        assert panel.locator(answer).count() == 0, "nothing is answered before the click"
        examples = panel.locator(".examples").locator("tbody tr, button.gallery-item")
        assert examples.count() == 3
        examples.last.click()
        panel.locator(answer).last.wait_for()
        assert panel.locator(answer).count() >= {"Search": 8, "Ground": 2}.get(tab, 1)
        chosen.add(panel.locator("textarea").input_value())
        assert overflow(seen) <= 0, tab
    assert len(chosen) == 3, "a caption, a question and a phrase of the example"


def test_a_picture_of_12_megapixels_is_answered_within_3_seconds(seen, tmp_path):
    rough = np.random.default_rng(0).integers(0, 255, (75, 100, 3), dtype=np.uint8)
    file = tmp_path / "photo.jpg"
    Image.fromarray(rough).resize((4000, 3000), Image.Resampling.BICUBIC).save(file, quality=92)
    seen.get_by_role("tab", name="Match").click()
    panel = seen.get_by_role("tabpanel").filter(visible=True)
    shown = seen.locator(".image-frame img").first
    before = shown.get_attribute("src")
    seen.get_by_label("Remove Image").first.click()
    started = time.monotonic()
    seen.locator("input[type=file]").first.set_input_files(file)
    playwright.expect(shown).not_to_have_attribute("src", before)
    panel.get_by_role("button", name="Match").click()
    panel.locator(ANSWERS["Match"]).wait_for()
    assert time.monotonic() - started < 3
