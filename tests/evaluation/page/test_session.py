import importlib.util
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from broken_images import png_of
from PIL import Image
from safetensors.torch import load_file, save_file

import vlp
from evaluation.__main__ import main
from evaluation.downstream.predict import predict_item
from evaluation.encoder import Encoder
from evaluation.page.gradio_page import PageBuilder, abilities, serve
from evaluation.page.session import ModelSession
from evaluation.retrieval.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError
from vlp.models.vlp import VLPModel
from vlp.training.engines.environment import free_port

TEXT = "a small red circle left of a blue square"
needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="gradio is not installed"
)


@pytest.fixture(scope="module")
def tried(model_folder, scene_shards):
    return ModelSession(model_folder, [scene_shards], device="cpu")


@pytest.fixture
def red():
    return Image.new("RGB", (24, 20), (220, 20, 20))


def test_a_search_orders_images_as_both_encoders_say(tried, model_folder):
    gallery = tried.gallery
    loaded = vlp.load(str(model_folder))
    with torch.no_grad():
        text = loaded.model.encode_text(*loaded.text([TEXT]))
        pixels = [loaded.preprocess(gallery.image(n).image) for n in range(len(gallery))]
        image = loaded.model.encode_image(torch.stack(pixels))
        cosine = (image.feature @ text.feature[0]).tolist()
        every = text.select(torch.zeros(len(gallery), dtype=torch.int64))
        odds = loaded.model.match(image, every).tolist()
        temperature = loaded.model.temperature().item()
    whole = [value / temperature + odd for value, odd in zip(cosine, odds)]
    hits = gallery.search(TEXT, top=len(gallery), rerank=len(gallery))
    assert [hit.image for hit in hits] == np.argsort(whole)[::-1].tolist()
    assert [hit.match for hit in hits] == pytest.approx([odds[h.image] for h in hits], abs=1e-4)
    plain = gallery.search(TEXT, top=5, rerank=0)
    assert [hit[::2] for hit in plain] == [(n, None) for n in np.argsort(cosine)[:-6:-1]]
    some = gallery.search(TEXT, top=6, rerank=3)
    near = np.argsort(cosine)[::-1]
    assert {hit.image for hit in some[:3]} == set(near[:3].tolist())
    assert [hit.image for hit in some[3:]] == near[3:6].tolist()
    shown = tried.search(TEXT)[0]
    [first] = gallery.search(TEXT, top=1, rerank=4)
    assert f"{torch.tensor(first.match).sigmoid():.2f}" in shown.text
    assert np.array_equal(np.asarray(shown.image), np.asarray(gallery.image(first.image).image))


@pytest.mark.parametrize("kind", ["plain", "snli_ve", "nlvr2", "vqa", "caption"])
def test_a_folder_does_what_it_was_trained_for_as_predict_does(task_folders, kind, tmp_path, red):
    one = ModelSession(task_folders[kind], device="cpu")
    blue = Image.new("RGB", (16, 16), (10, 20, 210))
    files = [tmp_path / "red.png", tmp_path / "blue.png"]
    for image, file in zip((red, blue), files):
        image.save(file)
    acts = {
        "plain": lambda: one.match(red, TEXT),
        "nlvr2": lambda: one.act([red, blue], TEXT),
        "vqa": lambda: one.act([red], "what colour is it?"),
        "caption": lambda: one.act([red]),
    }
    text = {"vqa": "what colour is it?", "caption": None}.get(kind, TEXT)
    expected = predict_item(task_folders[kind], files[: 1 + (kind == "nlvr2")], text, "cpu")
    answers = acts.get(kind, lambda: one.act([red], TEXT))()
    assert [text for text, _ in answers] == [text for text, _ in expected.answers]
    assert [p for _, p in answers] == pytest.approx([p for _, p in expected.answers], abs=1e-5)


def test_maps_and_anchors_are_images_of_the_image(tried, monkeypatch):
    wide = Image.new("RGB", (64, 32), (220, 20, 20))
    plain, heat = tried.ground(wide, "a red circle")
    assert plain.size == heat.size == (480, 240)
    assert plain.getpixel((5, 5)) == (220, 20, 20)
    assert not np.array_equal(np.asarray(plain), np.asarray(heat))
    shown = tried.anchors(wide, "a red circle")
    assert [one.text for one in shown[1:]] == ["a", "red", "circle"]
    assert {one.image.size for one in shown} == {(240, 120)}
    word = tried.loaded.model.text_encoder.embedding.word
    monkeypatch.setitem(word._parameters, "weight", torch.nn.Parameter(word.weight * torch.nan))
    for act, inputs in ((tried.search, ()), (tried.ground, (wide,)), (tried.anchors, (wide,))):
        with pytest.raises(EvaluationError, match="not finite"):
            act(*inputs, TEXT)


def test_mistakes_are_told_to_the_person(tried, red):
    for act, message in (
        (lambda: tried.search("  "), "type a text first"),
        (lambda: tried.ground(None, "a"), "choose an image first"),
        (lambda: tried.match(red, "a " * 50_001), "at most 100,000 are read"),
    ):
        with pytest.raises(EvaluationError, match=message):
            act()


def test_an_upload_is_decoded_within_the_limits(tried, tmp_path, red, monkeypatch):
    file = tmp_path / "upload.png"
    red.save(file)
    assert tried.match(file, TEXT) == tried.match(red, TEXT) == tried.match(str(file), TEXT)
    monkeypatch.setenv("VLP_LIMITS", "{pixels: 479}")
    with pytest.raises(EvaluationError, match=r"cannot be used: image too large: upload\.png"):
        tried.match(file, TEXT)
    file.write_bytes(b"<html>")
    with pytest.raises(EvaluationError, match=r"unreadable image: upload\.png"):
        tried.ground(file, "a red circle")
    with pytest.raises(EvaluationError, match="cannot be used"):
        tried.match(tmp_path / "absent.png", TEXT)


def test_without_gradio_the_command_says_what_to_install(model_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["demo", "--model", str(model_folder)]) == 2
    assert "pip install" in capsys.readouterr().err


@needs_gradio
@pytest.mark.parametrize("kind", ["plain", "nlvr2", "caption"])
def test_every_action_has_examples_that_it_answers(task_folders, kind):
    made = PageBuilder(ModelSession(task_folders[kind], device="cpu")).build()
    public = [one for one in made.fns.values() if one.api_visibility == "public"]
    tables = [one for one in made.blocks.values() if one.get_block_name() == "dataset"]
    assert len(public) == len(tables) == (3 if kind == "plain" else 4)
    for act, table in zip(public, tables):
        assert len(table.samples) == 3
        assert len(table.samples[0]) == len(act.inputs)
        assert act.fn(*table.raw_samples[-1])
        assert all(part.value for part in act.inputs), "the page opens with the first one"


@needs_gradio
def test_a_mistake_leaves_no_older_result(tried):
    made = PageBuilder(tried).build()
    acts = {n: one for n, one in made.fns.items() if one.api_visibility == "public"}
    for number, act in acts.items():
        (after,) = [one for one in made.fns.values() if one.trigger_after == number]
        assert after.trigger_only_on_failure
        assert after.outputs == act.outputs
        assert after.fn() == (None if len(act.outputs) == 1 else [None] * len(act.outputs))


def test_a_match_score_that_was_never_trained_ranks_nothing(
    model_folder, scene_shards, red, tmp_path
):
    folder = shutil.copytree(model_folder, tmp_path / "aligned")
    weights = load_file(folder / "model.safetensors")
    weights["match_head.bias"].zero_()
    save_file(weights, folder / "model.safetensors")
    tried = ModelSession(folder, [scene_shards], device="cpu")
    assert "match" not in "".join(one.text for one in tried.search(TEXT))
    for act in (tried.match, tried.ground):
        with pytest.raises(EvaluationError, match=r"never trained to match \(no ITM\)"):
            act(red, TEXT)
    assert "Match and Ground (a model trained by ITM)" in abilities(tried)
    result = evaluate_retrieval(tried.loaded, [scene_shards], rerank=2)
    assert "The match score was never trained" in str(result.table())


def test_a_second_start_of_the_page_encodes_nothing_again(
    model_folder, scene_shards, tmp_path, monkeypatch
):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    shards = shutil.copytree(scene_shards, tmp_path / "shards")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    started, encoded = [], []
    monkeypatch.setattr("evaluation.page.gradio_page.gradio_module", lambda: None)
    monkeypatch.setattr("evaluation.page.gradio_page.serve", lambda one, *_: started.append(one))
    collect = Encoder.collect
    monkeypatch.setattr(Encoder, "collect", lambda *args: encoded.append(1) or collect(*args))

    def start():
        count = len(encoded)
        assert main(["app", "--model", str(folder), "--shards", str(shards)]) == 0
        hits = started[-1].gallery.search(TEXT, top=8, rerank=16)
        return len(encoded) > count, [h.image for h in hits], [h.match for h in hits]

    first, again = start(), start()
    assert (first[0], again[0], again[1]) == (True, False, first[1])
    assert again[2][:8] == pytest.approx(first[2][:8], abs=1e-4)
    [file] = (tmp_path / "cache").rglob("*.npz")
    assert file.parent.stat().st_mode & 0o777 == 0o700

    def change_code():
        encode = VLPModel.encode_image
        monkeypatch.setattr(VLPModel, "encode_image", lambda self, x: encode(self, -3 * x))

    weights = load_file(folder / "model.safetensors")
    for change in (
        lambda: file.write_bytes(file.read_bytes()[:-90]),
        lambda: file.write_bytes((b := file.read_bytes())[:900] + b"!" + b[901:]),
        lambda: save_file({k: v * 1.1 for k, v in weights.items()}, folder / "model.safetensors"),
        lambda: os.utime(next(shards.glob("*.tar")), (1, 1)),
        change_code,
    ):
        change()
        assert [start()[0], start()[0]] == [True, False]
    os.environ["XDG_CACHE_HOME"] = str(file)  # where no folder can be
    assert start()[0]


@needs_gradio
def test_the_page_answers_a_call(tried, tmp_path, red, monkeypatch):
    monkeypatch.setattr("evaluation.page.gradio_page.MAX_IMAGE_BYTES", 2**25)
    client = pytest.importorskip("gradio_client")
    port = free_port()
    blocks = serve(tried, "127.0.0.1", port, block=False)
    try:
        assert blocks.share_url is None
        asked = client.Client(f"http://127.0.0.1:{port}", verbose=False, analytics_enabled=False)
        assert len(asked.predict(TEXT, api_name="/search")) == 8
        red.save(tmp_path / "red.png")
        file = client.handle_file(str(tmp_path / "red.png"))
        said = asked.predict(file, TEXT, api_name="/match")
        assert {one["label"] for one in said["confidences"]} == {"matches", "does not"}
        # Uploads of this user are another one's neither to read nor to keep from the page.
        uploads = Path(os.environ["GRADIO_TEMP_DIR"])
        assert uploads.stat().st_mode & 0o777 == 0o700
        assert list(uploads.rglob("red.png"))
        assert not list(Path(tempfile.gettempdir(), "gradio").rglob("red.png"))
        with pytest.raises(Exception, match="type a text first"):
            asked.predict(file, "", api_name="/ground")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(Exception, match="the text has 50,000,000 letters; at most 100,000"):
            asked.predict(file, "a " * 25_000_000, api_name="/ground")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
        for content, message in (
            (png_of(9000, 9000), "image too large"),
            (b"<html>", "cannot be used: unreadable image"),
            (bytes(2**25 + 1), "413|exceed|size"),
        ):
            (tmp_path / "bad.png").write_bytes(content)
            with pytest.raises(Exception, match=message):
                asked.predict(
                    client.handle_file(str(tmp_path / "bad.png")), TEXT, api_name="/match"
                )
        assert blocks.server_name == "127.0.0.1"
        with pytest.raises(EvaluationError, match="--port"):
            serve(tried, "127.0.0.1", port, block=False)
    finally:
        blocks.close()
