"""Figures of captions: those of the metrics on what the model writes."""

import shutil

import numpy as np
import pytest
from question_shards import AUGMENT, coloured, photo, toy_parts, write_shards

from evaluation.downstream import evaluate_task
from evaluation.downstream.submissions import write_captions
from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError
from vlp.data.schema import Annotation
from vlp.tasks.caption import metrics as captions
from vlp.tasks.caption.metrics import caption_scores
from vlp.tasks.caption.task import CaptionConfig, build


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("captions"), coloured(6))


def made(shards, **options):
    data = {"train": [str(shards)], "canonical_streams": 1, "augment": AUGMENT, "max_caption": 6}
    values = {"data": data, "decoder": {"layers": 1}, "java": False, **options}
    task, _ = build(CaptionConfig.model_validate(values), toy_parts(seed=1), 2, 0, "float32")
    return task


def test_figures_are_those_of_the_metrics(shards, tmp_path):
    result = evaluate_task(made(shards), [shards], options=EvalOptions(batch=4, resamples=20))
    said = [row["caption"] for row in result.predictions]
    truth = [list(sample.captions) for _, sample in coloured(6)]
    wanted = caption_scores(said, truth, "plain", meteor=False)
    for name in ("bleu1", "bleu4", "cider", "rouge_l"):
        assert result.metrics[name] == pytest.approx(wanted.corpus[name])
    assert "meteor" not in result.metrics
    assert result.figures["rouge_l"].low <= result.metrics["rouge_l"]
    assert "no METEOR, no SPICE" in result.table().text()
    result.save(tmp_path)
    write_captions(tmp_path / "results.json", result.predictions)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
def test_with_java_there_is_meteor_and_a_word_about_spice(shards):
    result = evaluate_task(made(shards, java=True), [shards], options=EvalOptions(resamples=2))
    assert np.isfinite(result.metrics["meteor"])
    said_so = any("Stanford CoreNLP" in note for note in result.notes)
    assert said_so != ("spice" in result.metrics)


def test_without_java_the_way_out_is_named(shards, monkeypatch):
    monkeypatch.setattr(captions.shutil, "which", lambda name: None)
    task = made(shards, java=True)
    monkeypatch.setattr(task, "predict", lambda inputs: pytest.fail("before anything is written"))
    with pytest.raises(EvaluationError, match=r"no `java` on the path.*`task.java: false`"):
        evaluate_task(task, [shards], options=EvalOptions(resamples=2))


def test_samples_of_one_image_are_one_item_with_all_references(shards, tmp_path):
    """As retrieval merges them: one caption an image against all that people wrote."""
    task = made(shards)
    whole, single = [], []
    for number, (image, annotation) in enumerate(coloured(4)):
        texts = [*annotation.captions, "some other words", f"picture {number}"]
        ids = {"image_id": str(number), "source": "own"}
        whole.append((image, Annotation(captions=texts, **ids)))
        single += [(image, Annotation(captions=[text], **ids)) for text in texts]
    options = EvalOptions(batch=3, resamples=4)
    results = [
        evaluate_task(task, [write_shards(tmp_path / name, samples)], options)
        for name, samples in (("whole", whole), ("single", single))
    ]
    assert results[0].metrics == results[1].metrics
    assert [result.counts["items"] for result in results] == [4, 4]
    write_captions(tmp_path / "results.json", results[1].predictions)
    alone = [(image, Annotation(captions=["a"], source="own")) for image, _ in coloured(3)]
    separate = evaluate_task(task, [write_shards(tmp_path / "alone", alone)], options)
    assert separate.counts["items"] == 3


def test_images_without_captions_are_captioned_and_not_counted(shards, tmp_path):
    samples = [(photo(), Annotation(image_id="1")), *coloured(2), (b"", Annotation(caption="a"))]
    task = made(shards)
    result = evaluate_task(
        task, [write_shards(tmp_path / "some", samples)], EvalOptions(resamples=2)
    )
    assert len(result.predictions) == 3
    assert result.skipped == {"unreadable image": 1}
    with pytest.raises(EvaluationError, match="no image has a caption"):
        evaluate_task(task, [write_shards(tmp_path / "none", samples[:1])])
