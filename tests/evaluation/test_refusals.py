"""What a command of an evaluation cannot do is one line, exit code 2, and leaves no file."""

from __future__ import annotations

import shlex

import pytest
from question_shards import photo

from evaluation.__main__ import main

ANCHORS = "anchors --model MODEL --out out/a.png"
GROUNDING = "grounding --model MODEL --shards SHARDS"
RETRIEVAL = "retrieval --model MODEL --shards SHARDS"
EMBED = "embed --model MODEL"
ZEROSHOT = "zeroshot --model MODEL --shards SHARDS"


@pytest.fixture
def places(tmp_path, monkeypatch, model_folder, scene_shards):
    """Be in a folder of images and lists, some of them unfit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    (tmp_path / "red.png").write_bytes(photo())
    (tmp_path / "broken.png").write_bytes(photo()[:40])
    for name, text in {
        "empty": "", "one": "red", "twice": "red\nred", "two": "red\nblue", "plain": "a photo",
        "template": "a {}",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    return {"MODEL": str(model_folder), "SHARDS": str(scene_shards)}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("retrieval --model ./nowhere --shards SHARDS", "nowhere"),
        ("retrieval --model MODEL --shards ./nowhere", "nowhere"),
        (f"{RETRIEVAL} --rerank-by match", "give rerank"),
        (f"{RETRIEVAL} --temperature 0.1", "give rerank"),
        (f"{RETRIEVAL} --rerank 2 --temperature 0", "greater than 0"),
        (f"{RETRIEVAL} --bank-temperature 0.2", "goes with bank"),
        (f"{GROUNDING} --by similarity --layer 0", "layer is of Grad-CAM"),
        (f"{GROUNDING} --layer 7", "no cross-modal layer 7"),
        (f"{ZEROSHOT} --classes two --match-by match", "give match"),
        (f"{ZEROSHOT} --classes gone --templates template", "gone: cannot be read"),
        (f"{ZEROSHOT} --classes empty --templates template", "empty: is empty"),
        (f"{ZEROSHOT} --classes one --templates template", "nothing to choose"),
        (f"{ZEROSHOT} --classes twice --templates template", "'red' comes twice"),
        (f"{ZEROSHOT} --classes two --templates plain", "'a photo' has no {}"),
        (f"{EMBED} --shards x --out fresh", "x: there is no such folder"),
        (f"{EMBED} --shards SHARDS --out taken", "--out taken"),
        (ANCHORS, "either --image and --text, or --shards"),
        (f"{ANCHORS} --image red.png --text a --shards SHARDS", "either --image"),
        (f"{ANCHORS} --image red.png", "go together"),
        (f"{ANCHORS} --shards SHARDS --text a", "go together"),
        (f"{ANCHORS} --image red.png --text a --count 2", "--count is for --shards"),
        (f"{ANCHORS} --shards SHARDS --layer 0", "--layer"),
        (f"{ANCHORS} --shards SHARDS --groups 2", "--groups"),
        (f"{ANCHORS} --image red.png --text a --groups 0", "--groups 0"),
        (f"{ANCHORS} --shards SHARDS --count 0", "count 0"),
        (f"{ANCHORS} --shards SHARDS --out a.jpg", "a.jpg"),
        (f"{ANCHORS} --image red.png --text a --layer 1", "layer 1"),
        (f"{ANCHORS} --image gone.png --text a", "gone.png: cannot be read"),
        (f"{ANCHORS} --image taken --text a", "Is a directory"),
        (f"{ANCHORS} --image broken.png --text a", "unreadable image"),
        (f"{ANCHORS} --image red.png --text ' '", "holds no word"),
        (f"{ANCHORS} --image red.png --text '[SEP]'", "holds no word"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_line(places, tmp_path, capsys, command, message):
    before = sorted(tmp_path.rglob("*"))
    assert main([places.get(word, word) for word in shlex.split(command)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert sorted(tmp_path.rglob("*")) == before
