import gzip
import json
from collections import Counter

import numpy as np
import pytest
from pair_shards import annotated_shards, entailment_shards, statement_shards, tiny_folder
from question_shards import coloured, photo, question, write_shards

from evaluation.__main__ import main
from evaluation.downstream.submissions import write_captions
from evaluation.downstream.task_evaluation import evaluate_task, sentence_of
from evaluation.downstream.vqa import VqaEvaluation
from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError
from vlp.data.schema import Annotation
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import sample_scene
from vlp.tasks.caption import metrics
from vlp.tasks.downstream.task import load_task, start_parts
from vlp.tasks.pair_classification.task import Nlvr2Config, PairClassification, SnliVeConfig
from vlp.tasks.vqa.metrics import vqa_accuracy


@pytest.fixture(scope="module")
def questions(task_folders):
    return task_folders["shards"]


@pytest.fixture(scope="module")
def vqa_task(task_folders):
    return load_task(task_folders["vqa"])


def test_figures_are_those_of_the_predictions(vqa_task, questions):
    result = evaluate_task(vqa_task, [questions], options=EvalOptions(batch=5, resamples=50))
    said = {row["question_id"]: row["answer"] for row in result.predictions}
    truth = {one.id: one for _, sample in coloured(12) for one in sample.questions}
    assert list(said) == list(truth)
    right = {
        number: vqa_accuracy(said[number], [(a.answer, a.count) for a in one.answers])
        for number, one in truth.items()
    }
    figures = result.metrics
    assert figures["accuracy"] == pytest.approx(np.mean(list(right.values())))
    for division, kind in (("answer", "yes/no"), ("answer", "other"), ("question", "what")):
        own = [
            right[n] for n, one in truth.items() if one.model_extra.get(f"{division}_type") == kind
        ]
        assert figures[f"{division}: {kind}"] == pytest.approx(np.mean(own))
    best = {n: max(one.answers, key=lambda a: a.count).answer for n, one in truth.items()}
    assert figures["exact"] == pytest.approx(np.mean([said[n] == best[n] for n in truth]))
    # `no` is said by 7 of 10 to a third of the questions, and counts 1 there.
    assert result.figures["accuracy"].chance == pytest.approx(1 / 3)


@pytest.mark.parametrize("version", ["official", "albef_copy"])
def test_figures_by_type_are_the_evaluators(vqa_task, shared, version):
    place = shared / "data_tasks" / "vqa_v2"
    with gzip.open(place / "annotations_test.json.gz") as file:
        asked = {one["question_id"]: one for one in json.load(file)["annotations"]}
    rows = []
    for row in json.loads((place / "eval_check" / "results.json").read_text()):
        one = asked[row["question_id"]]
        answers = Counter(each["answer"] for each in one["answers"])
        types = {"answer": one["answer_type"], "question": one["question_type"]}
        rows.append({**row, "answers": answers, "types": types, "image": str(one["image_id"])})
    figures = VqaEvaluation().score(vqa_task, rows, 2, version=version).figures
    expected = json.loads((place / "eval_check" / "expected_accuracy.json").read_text())[version]
    for division, name in (("answer", "perAnswerType"), ("question", "perQuestionType")):
        assert expected[name] == {
            kind.removeprefix(f"{division}: "): round(100 * figure.value, 4)
            for kind, figure in figures.items()
            if kind.startswith(f"{division}: ")
        }


def test_the_command_writes_freely_and_takes_the_other_evaluator(vqa_task, questions, tmp_path):
    vqa_task.save_model(tmp_path, vqa_task.state_dict())
    options = ["--predict", "generate", "--version", "albef_copy"]
    assert main(["vqa", "--model", str(tmp_path), "--shards", str(questions), *options]) == 0
    table = (tmp_path / "evaluation/vqa.md").read_text()
    assert "Answers by: writing" in table
    assert "the evaluator 'albef_copy'" in table


def test_intervals_are_over_images(vqa_task, tmp_path):
    """Two samples of one image are drawn together, so nothing varies."""
    image = {"source": "toy", "image_id": "1"}
    samples = [
        (photo(), Annotation(**image, questions=[question(n, "is it?", {answer: 1})]))
        for n, answer in enumerate(("yes", "no", "red", "blue", "green", "left"))
    ]
    result = evaluate_task(vqa_task, [write_shards(tmp_path, samples)], EvalOptions(resamples=100))
    figure = result.figures["accuracy"]
    assert figure.value == pytest.approx(1 / 6)
    assert figure.low == figure.high == pytest.approx(1 / 6)


@pytest.fixture
def caption_task(task_folders):
    return load_task(task_folders["caption"])


def test_figures_are_those_of_the_metrics(caption_task, questions, tmp_path):
    options = EvalOptions(batch=4, resamples=20)
    result = evaluate_task(caption_task, [questions], options=options)
    said = [row["caption"] for row in result.predictions]
    truth = [list(sample.captions) for _, sample in coloured(12)]
    wanted = metrics.caption_scores(said, truth, java=False)
    for name in ("bleu1", "bleu4", "cider", "rouge_l"):
        assert result.metrics[name] == pytest.approx(wanted.corpus[name])
    assert "meteor" not in result.metrics
    assert result.figures["rouge_l"].low <= result.metrics["rouge_l"]
    assert "no METEOR, no SPICE" in result.table().text()
    result.save(tmp_path)
    write_captions(tmp_path / "results.json", result.predictions)


def test_without_java_the_way_out_is_named(caption_task, questions, monkeypatch):
    monkeypatch.setattr(metrics.shutil, "which", lambda name: None)
    caption_task.config = caption_task.config.model_copy(update={"java": True})
    monkeypatch.setattr(
        caption_task, "predict", lambda inputs: pytest.fail("before anything is written")
    )
    with pytest.raises(EvaluationError, match=r"no `java` on the path.*`task.java: false`"):
        evaluate_task(caption_task, [questions], options=EvalOptions(resamples=2))


def test_samples_of_one_image_are_one_item_with_all_references(caption_task, tmp_path):
    whole, single = [], []
    for number, (image, annotation) in enumerate(coloured(4)):
        texts = [*annotation.captions, "some other words", f"picture {number}"]
        ids = {"image_id": str(number), "source": "own"}
        whole.append((image, Annotation(captions=texts, **ids)))
        single += [(image, Annotation(captions=[text], **ids)) for text in texts]
    options = EvalOptions(batch=3, resamples=4)
    results = [
        evaluate_task(caption_task, [write_shards(tmp_path / name, samples)], options)
        for name, samples in (("whole", whole), ("single", single))
    ]
    assert results[0].metrics == results[1].metrics
    assert [result.counts["items"] for result in results] == [4, 4]
    write_captions(tmp_path / "results.json", results[1].predictions)
    alone = [(image, Annotation(captions=["a"], source="own")) for image, _ in coloured(3)]
    separate = evaluate_task(caption_task, [write_shards(tmp_path / "alone", alone)], options)
    assert separate.counts["items"] == 3
    marks = write_shards(tmp_path / "marks", [(photo(), Annotation(captions=["!!!", "..."]))])
    with pytest.raises(EvaluationError, match="no reference has a word"):
        evaluate_task(caption_task, [marks], options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("caption", {}), ("vqa", {}), ("vqa", {"predict": "generate"}), ("snli_ve", {})],
)
def test_logits_that_are_not_finite_are_an_error(task_folders, tmp_path, kind, options):
    asked = {"hypothesis": "a red circle", "questions": [question(1, "is it red?", {"no": 1})]}
    shards = write_shards(tmp_path, [(photo(), Annotation(**asked))])
    task = load_task(task_folders[kind])
    for parameter in getattr(task, "decoder", task).head.parameters():
        parameter.data.fill_(np.nan)
    with pytest.raises(EvaluationError, match="not finite"):
        evaluate_task(task, [shards], **options)


def task_of(kind, tmp_path):
    parts, _ = start_parts(str(tiny_folder(tmp_path / "model")), {})
    return PairClassification(kind.model_validate({"data": {"train": ["unused"]}}), parts)


def test_accuracy_is_the_share_of_right_predictions(tmp_path):
    shards = entailment_shards(tmp_path / "shards", 30)
    result = evaluate_task(task_of(SnliVeConfig, tmp_path), [shards], options=EvalOptions(batch=7))
    rows = result.predictions
    assert len(rows) == result.counts["items"] == 30
    right = [row["prediction"] == row["label"] for row in rows]
    assert result.figures["accuracy"].value == pytest.approx(sum(right) / 30)
    for name in ("entailment", "neutral", "contradiction"):
        own = [ok for ok, row in zip(right, rows) if row["label"] == name]
        assert result.figures[name].value == pytest.approx(sum(own) / len(own))
    most = max(sum(row["label"] == name for row in rows) for name in result.figures)
    assert result.figures["accuracy"].chance == pytest.approx(most / 30)


def test_consistency_counts_sentences_that_are_always_right(tmp_path):
    shards = statement_shards(tmp_path / "shards", 24)
    result = evaluate_task(task_of(Nlvr2Config, tmp_path), [shards])
    wrong = {row["text"] for row in result.predictions if row["prediction"] != row["label"]}
    every = {row["text"] for row in result.predictions}
    assert len(every) < 24, "some sentence comes twice"
    expected = 1 - len(wrong) / len(every)
    assert result.figures["consistency"].value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("identifier", "sentence"),
    [
        ("dev-850-0-1", "dev-850-1"),  # NLVR2: split, set, pair, sentence
        ("850-3", "850: There is a dog."),  # NLVR v1: sentence, image
        ("unknown", "There is a dog."),
        (None, "There is a dog."),
    ],
)
def test_a_sentence_is_what_the_official_evaluators_take_for_one(identifier, sentence):
    assert sentence_of({"identifier": identifier, "text": "There is a dog."}) == sentence


def test_bad_samples_are_counted_and_unlabelled_ones_predicted(tmp_path):
    image = encode_png(render(sample_scene(0, 0, image_size=16)))
    annotations = [
        Annotation(hypothesis="a red circle", label="neutral"),
        Annotation(hypothesis="a red circle", label="perhaps"),
        Annotation(hypothesis="a red circle"),
        Annotation(hypothesis="a blue square " * 9, label="entailment"),
    ]
    shards = annotated_shards(tmp_path / "shards", annotations, image)
    task = task_of(SnliVeConfig, tmp_path)
    result = evaluate_task(task, [shards])
    assert "1 of 3 texts are truncated to max_tokens." in result.notes
    assert result.skipped == {"unknown label": 1}
    assert result.counts["items"] == 3
    assert "contradiction" not in result.figures
    unlabelled = annotated_shards(tmp_path / "test", annotations[2:3], image)
    with pytest.raises(EvaluationError, match="no sample has a label"):
        evaluate_task(task, [unlabelled])
