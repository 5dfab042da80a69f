import numpy as np
import pytest
import torch
from question_shards import COLOURS, photo

import vlp
from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError
from evaluation.zeroshot import Prompts, evaluate_zeroshot, read_prompts, rerank_scores
from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter

CLASSES = ("red", "green", "blue", "a circle", "yellow", "purple")
TEMPLATES = ("a photo of a {}.", "{}")
PROMPTS = Prompts(CLASSES, CLASSES, TEMPLATES)
LABELS = [list(COLOURS)[number % 3] for number in range(7)]


def shade(number):
    """Images of one class differ in size, so in what the model sees of their borders."""
    return photo(LABELS[number], 20 + number)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classed")
    with ShardWriter(folder, samples_per_shard=3) as writer:
        for number, label in enumerate(LABELS):
            said = Annotation(label=label, colour=label, image_id=str(number), source="toy")
            writer.write(f"{number}", shade(number), "png", said)
    return folder


@pytest.fixture(scope="module")
def loaded(model_folder):
    return vlp.load(model_folder)


def slow_scores(loaded, templates=TEMPLATES):
    """(images, classes) cosines and (images, classes, templates) log-odds, one by one."""
    model, cosines, odds = loaded.model, [], []
    with torch.no_grad():
        for number in range(len(LABELS)):
            image = model.encode_image(loaded.preprocess(decode_image(shade(number), ""))[None])
            row, own = [], []
            for name in CLASSES:
                texts = [
                    model.encode_text(*loaded.text([template.replace("{}", name)]))
                    for template in templates
                ]
                mean = sum(text.feature[0].double() for text in texts) / len(texts)
                row.append(float(image.feature[0].double() @ mean / mean.norm()))
                own.append([float(model.match(image, text)) for text in texts])
            cosines.append(row)
            odds.append(own)
    return np.array(cosines), np.array(odds)


def hits(scores, k):
    own = np.array([CLASSES.index(label) for label in LABELS])
    right = np.take_along_axis(scores, own[:, None], 1)
    return ((scores >= right).sum(1) <= k).mean()


def test_figures_equal_the_slow_ones(loaded, shards):
    cosines, _ = slow_scores(loaded)
    result = evaluate_zeroshot(loaded, [shards], PROMPTS, EvalOptions(batch=3, resamples=20))
    for k in (1, 5):
        assert result.metrics[f"top-{k}"] == pytest.approx(hits(cosines, k))
        assert result.figures[f"top-{k}"].chance == pytest.approx(k / 6)
    assert [row["prediction"] for row in result.predictions] == [
        CLASSES[number] for number in cosines.argmax(1)
    ]
    by_class = {
        name: np.mean([row["ranks"]["dual"] == 1 for row in result.predictions
                       if row["label"] == name])
        for name in COLOURS
    }  # fmt: skip
    assert {name: figure.value for name, figure in result.classes.items()} == by_class
    assert result.metrics["mean over classes"] == pytest.approx(np.mean(list(by_class.values())))


@pytest.mark.parametrize("by", ["match", "sum"])
def test_the_best_classes_are_scored_again(loaded, shards, by):
    cosines, odds = slow_scores(loaded)
    new = odds.mean(-1)
    if by == "sum":
        new = new + cosines / loaded.model.temperature().item()
    final = cosines - 1000
    for row, near in enumerate(np.argsort(-cosines, axis=1)[:, :3]):
        final[row, near] = new[row, near]
    options = EvalOptions(batch=4, resamples=5)
    result = evaluate_zeroshot(loaded, [shards], PROMPTS, options, match=3, match_by=by)
    assert result.metrics["top-1"] == pytest.approx(hits(final, 1))
    assert result.metrics["top-1, dual encoder"] == pytest.approx(hits(cosines, 1))
    assert [row["prediction"] for row in result.predictions] == [
        CLASSES[number] for number in final.argmax(1)
    ]
    all_again = evaluate_zeroshot(loaded, [shards], PROMPTS, options, match=99, match_by=by)
    assert all_again.metrics["top-1"] == pytest.approx(hits(new, 1))


def test_reordered_scores_keep_the_rest_behind():
    scores = np.array([[0.9, 0.1, 0.5, 0.4], [0.2, 0.3, 0.1, 0.0]])
    near = np.array([[0, 2], [1, 0]])
    found = rerank_scores(scores, near, np.array([[-7.0, 3.0], [-9.0, 1.0]]))
    assert np.argsort(-found, axis=1).tolist() == [[2, 0, 3, 1], [0, 1, 2, 3]]


def test_sources_are_joined_and_limited(loaded, shards, tmp_path):
    folder = tmp_path / "folder"
    for number, label in enumerate(LABELS):
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / label / f"{number}.png").write_bytes(shade(number))
    options = EvalOptions(resamples=5)
    one = evaluate_zeroshot(loaded, [shards], PROMPTS, options)
    other = evaluate_zeroshot(loaded, [shards], PROMPTS, options, label_field="colour")
    assert other.metrics == one.metrics
    both = evaluate_zeroshot(loaded, [folder, shards], PROMPTS, options)
    assert both.counts["items"] == 14
    assert both.metrics["top-1"] == pytest.approx(one.metrics["top-1"])
    some = evaluate_zeroshot(loaded, [folder, shards], PROMPTS, EvalOptions(limit=9, resamples=5))
    assert [row["key"] for row in some.predictions][7:] == ["0", "1"]


def test_images_of_unknown_classes_are_counted(loaded, shards, tmp_path):
    with ShardWriter(tmp_path / "odd") as writer:
        for number, label in enumerate(("red", "zebra", None)):
            writer.write(f"{number}", photo(), "png", Annotation(label=label))
    result = evaluate_zeroshot(loaded, [tmp_path / "odd"], PROMPTS, EvalOptions(resamples=5))
    assert result.counts["items"] == 1
    assert result.skipped == {"no class": 1, "unknown class": 1}
    with pytest.raises(EvaluationError, match=r"no usable item; the first: no class"):
        evaluate_zeroshot(loaded, [shards], PROMPTS, label_field="nothing")


def test_classes_that_are_equal_once_they_are_cut_are_counted(loaded, shards, monkeypatch):
    names = ("red", "green", "blue", *(f"{'a ' * 30}{end}" for end in ("circle", "square")))
    calls, tokenize = [], type(loaded.text).__call__
    monkeypatch.setattr(
        type(loaded.text), "__call__", lambda self, t: calls.extend(t) or tokenize(self, t)
    )
    result = evaluate_zeroshot(loaded, [shards], Prompts(names, names, ("{}",)))
    assert result.notes[1:3] == (
        "2 of 5 prompts are truncated to max_tokens.",
        "1 classes have the tokens of an earlier class and are never predicted.",
    )
    assert sorted(calls) == sorted(names), "no prompt is tokenised twice"


def test_names_and_prompts_are_read_from_files(tmp_path):
    named = "red\n\ngreen\tthe green one\nblue\n"
    (tmp_path / "classes.txt").write_text(named, encoding="utf-8-sig")
    (tmp_path / "templates.txt").write_text("a {} square\na photo of {}\n")
    prompts = read_prompts(tmp_path / "classes.txt", tmp_path / "templates.txt")
    assert prompts.labels == ("red", "green", "blue")
    assert prompts.of_class(1) == ["a the green one square", "a photo of the green one"]
