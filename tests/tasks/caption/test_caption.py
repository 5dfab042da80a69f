import json
import math
from types import SimpleNamespace

import pytest
import torch
from question_shards import AUGMENT, coloured, photo, toy_parts, toy_text, write_shards
from tests_support import first_batch, train
from torch.nn import functional

from vlp.data.config import AugmentConfig
from vlp.data.downstream.dataset import ImagePreparation
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import Items
from vlp.tasks.caption import metrics as spice
from vlp.tasks.caption.data import CaptionDataConfig, CaptionDataset, captions_in
from vlp.tasks.caption.metrics import PARSER, caption_scores, spice_scores
from vlp.tasks.caption.task import CaptionConfig, build


def captions(folder, parts=captions_in, **options):
    values = {"train": [str(folder)], "canonical_streams": 1, "augment": AUGMENT,
              "max_skipped_share": 1.0, **options}  # fmt: skip
    config = CaptionDataConfig.model_validate(values)
    preprocess = Preprocessing(16)
    transform = TrainTransform(AugmentConfig.model_validate(AUGMENT), preprocess)
    prepare = ImagePreparation(transform, preprocess, "image", 4)
    return CaptionDataset(Items([folder], parts), toy_text(), prepare, config)


def batches(own, batch, count=1):
    return [one for one, _ in own.batches(own.config, batch, 0).batches(stop_after=count)]


def said(own, batch):
    text = own.text.tokenizer
    return [text.decode(row, skip_special_tokens=True) for row in batch.caption_ids.tolist()]


def test_all_captions_come_once_an_epoch(tmp_path):
    own = captions(write_shards(tmp_path, coloured(3)))
    (batch,) = batches(own, 6)
    wanted = {
        f"a {rest}" for c in ("red", "green", "blue") for rest in (f"{c} picture", f"plain {c} one")
    }
    assert set(said(own, batch)) == wanted
    assert batch.valid.all()


def test_one_caption_is_drawn_per_image_and_visit(tmp_path):
    own = captions(write_shards(tmp_path, coloured(3)), None, captions="one")
    assert len(own.items) == 3
    seen = {one for batch in batches(own, 3, 8) for one in said(own, batch)}
    assert len(seen) == 6
    assert [said(own, one) for one in batches(own, 3, 2)] == [
        said(own, one) for one in batches(own, 3, 2)
    ]


def test_a_image_to_be_captioned_needs_no_caption(tmp_path):
    own = captions(write_shards(tmp_path, [(photo(), Annotation(image_id="7"))]), None)
    sample = own.make(own.items.read(0), 0)
    assert sample.captions == ()
    assert own.collate([sample]).pixels.shape == (1, 3, 16, 16)


def test_bad_samples_are_skipped_and_named(tmp_path):
    samples = [(photo(), Annotation()), (b"", Annotation(caption="a red picture")), *coloured(1)]
    (batch,) = batches(captions(write_shards(tmp_path, samples)), 4)
    assert batch.valid.tolist() == [True, True]
    assert sorted(skip.kind for skip in batch.skipped) == ["no text", "unreadable image"]


def test_long_captions_are_cut(tmp_path):
    own = captions(write_shards(tmp_path, coloured(1)), max_caption=4)
    (batch,) = batches(own, 2)
    assert batch.caption_ids.shape == (2, 4)
    assert torch.equal(batch.caption_ids[:, -1], torch.full((2,), own.text.sep_id))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("captions"), coloured(12))


def built(shards, batch=8, data=(), **options):
    values = {
        "data": {"train": [str(shards)], "canonical_streams": 1, "augment": AUGMENT,
                 "max_caption": 10, **dict(data)},
        "decoder": {"layers": 2},
        **options,
    }  # fmt: skip
    return build(CaptionConfig.model_validate(values), toy_parts(), batch, 0, "float32")


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_smoothed_cross_entropy_per_word(shards, smoothing):
    task, data = built(shards, label_smoothing=smoothing)
    batch = first_batch(data)
    batch = batch._replace(valid=torch.tensor([True] * 6 + [False] * 2))
    words, pad = task.model.text_encoder.embedding, task.text.pad_id
    states = task.model.encode_image(batch.pixels).states
    logits = task.decoder.logits(
        task.decoder(batch.caption_ids[:, :-1], task.decoder.remember(states), words), words
    )
    wanted = functional.cross_entropy(
        logits[:6].flatten(0, 1), batch.caption_ids[:6, 1:].flatten(), ignore_index=pad,
        label_smoothing=smoothing,
    )  # fmt: skip
    torch.testing.assert_close(task(batch, 0).loss, wanted)
    plain = functional.cross_entropy(
        logits[:6].flatten(0, 1), batch.caption_ids[:6, 1:].flatten(), ignore_index=pad
    )
    torch.testing.assert_close(task.eval()(batch, 0).loss, plain)


def test_it_learns_to_caption(shards):
    torch.manual_seed(0)
    task, data = built(shards, batch=12, data={"captions": "one"}, label_smoothing=0.0)
    train(task, data, 80, 5e-3)
    task.eval()
    own = task.dataset([shards])
    batch = own.collate([own.make(own.items.read(number), number) for number in range(6)])
    for colour, caption in zip(("red", "green", "blue") * 2, task.predict(batch)):
        assert caption in (f"a {colour} picture", f"a plain {colour} one")


def plain(candidates, references):
    return caption_scores(candidates, references, java=False)


@pytest.mark.nightly
def test_published_scores_of_coco_captions(shared):
    folder = shared / "data/caption_metrics/coco_val2014_973"
    said: dict[int, list[str]] = {}
    for row in json.loads((folder / "captions_val2014_973.json").read_text())["annotations"]:
        said.setdefault(row["image_id"], []).append(row["caption"])
    rows = json.loads((folder / "captions_val2014_973_results.json").read_text())
    published = json.loads((folder / "published_scores.json").read_text())["scores"]
    scores = caption_scores(
        [row["caption"] for row in rows], [said[row["image_id"]] for row in rows]
    ).corpus
    names = {"rouge_l": "ROUGE_L", "cider": "CIDEr", "meteor": "METEOR"}
    names |= {f"bleu{n}": f"Bleu_{n}" for n in range(1, 5)}
    assert set(scores) == set(names)
    for ours, theirs in names.items():
        assert scores[ours] == pytest.approx(published[theirs], abs=5.1e-4), ours


def test_figures_by_hand():
    scores = plain(["delete the second row", "go home"], [["Delete the first row!"], ["go home"]])
    # 5 of 6 words; of word pairs "delete the" and "go home" of 4. Lengths agree: no penalty.
    assert scores.corpus["bleu1"] == pytest.approx(5 / 6, abs=1e-6)
    assert scores.corpus["bleu2"] == pytest.approx(math.sqrt(5 / 6 * 2 / 4), abs=1e-6)
    assert scores.per_caption["rouge_l"] == pytest.approx([0.75, 1.0])
    assert scores.corpus["rouge_l"] == pytest.approx(0.875)
    assert scores.corpus["cider"] == pytest.approx(scores.per_caption["cider"].mean())
    assert "meteor" not in scores.corpus


def test_empty_captions_score_nothing_and_shift_nobody():
    scores = caption_scores(["", "a ||| dog", ""], [["...", "x y"], ["a ||| dog"], ["a cat"]])
    assert scores.per_caption["rouge_l"].tolist() == [0, 1, 0]
    assert scores.per_caption["meteor"].tolist() == [0, 1, 0]
    assert set(plain(["", ""], [["a dog"], ["b"]]).corpus.values()) == {0.0}


@pytest.mark.parametrize(
    ("candidates", "references", "message"),
    [
        ([], [], "0 captions"),
        (["a"], [["a"], ["b"]], "1 captions, but references of 2"),
        (["a", "b"], [["a"], []], "caption 1 \\('b'\\) has no reference"),
        (["a"], [[" "]], "caption 0"),
        (["a"], [["..."]], "no reference has a word"),
    ],
)
def test_refusals(candidates, references, message):
    with pytest.raises(ValueError, match=message):
        plain(candidates, references)


def test_spice_scores_of_captions_without_tuples_are_zero(monkeypatch, tmp_path):
    def compute_score(wanted, found):
        assert (wanted[1], found[1]) == (["a 0", "one 1"], ["b"])
        return 0.5, [{"All": {"f": score}} for score in (1.0, float("nan"))]

    scorer = SimpleNamespace(compute_score=compute_score)
    module = SimpleNamespace(__file__=str(tmp_path / "spice.py"), Spice=lambda: scorer)
    monkeypatch.setattr(spice, "_module", lambda name: module)
    monkeypatch.setattr(spice, "require_caption_tools", lambda: None)
    (tmp_path / "lib").mkdir()
    for name in PARSER:
        (tmp_path / "lib" / name).touch()
    assert spice_scores(["a", "b"], [["a 0", "one\n 1"]] * 2).tolist() == [1.0, 0.0]


@pytest.mark.nightly
def test_scores_are_the_same_in_every_place(monkeypatch):
    """Of a user's language, and where the package may not be written to."""
    said = ["a red circle", "I sit in a blue square"], [["a red circle left"], ["blue square"]]
    wanted = caption_scores(*said).corpus
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=tr -Duser.country=TR")
    access = spice.os.access
    monkeypatch.setattr(
        spice.os, "access", lambda path, mode, **how: mode != 2 and access(path, mode, **how)
    )
    assert caption_scores(*said).corpus == wanted
