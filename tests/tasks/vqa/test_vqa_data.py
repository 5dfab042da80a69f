"""Questions as batches, lists of answers, and VQA accuracy."""

import gzip
import json
from collections import Counter
from io import BytesIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from question_shards import AUGMENT, coloured, photo, question, toy_text, write_shards

from vlp.config import ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.downstream.dataset import ImagePreparation
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import Items
from vlp.data.stream.loader import IndexedSamples
from vlp.data.stream.sampler import Element, Request
from vlp.tasks.vqa.data import (
    VqaDataConfig,
    VqaDataset,
    answers_of,
    frequent_answers,
    questions_in,
    read_answers,
)
from vlp.tasks.vqa.metrics import ENOUGH, normalise_answer, vqa_accuracy


def questions(folder, limit=None, max_answer=5, **augment):
    """The set of a folder's questions."""
    preprocess = Preprocessing(16)
    transform = TrainTransform(AugmentConfig.model_validate(AUGMENT | augment), preprocess)
    prepare = ImagePreparation(transform, preprocess, "image", 4)
    return VqaDataset(Items([folder], questions_in, limit), toy_text(), prepare, max_answer)


def made(own, number):
    return own.make(own.items.read(number), number)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("vqa"), coloured(6))


def test_every_question_is_an_item(shards):
    own = questions(shards)
    assert len(own.items) == 12
    asked = [made(own, number) for number in range(12)]
    assert [one.question.id for one in asked[:4]] == ["0", "1", "10", "11"]
    assert asked[3].answers == {"no": 7, "left": 3}
    assert asked[2].types == {"answer": "other", "question": "what"}
    assert torch.equal(asked[0].pixels, asked[1].pixels)
    assert not torch.equal(asked[0].pixels, asked[2].pixels)


def test_a_batch_holds_all_answers_with_their_shares(shards):
    own = questions(shards)
    batch = own.collate([made(own, 1), made(own, 2)])
    assert batch.owners.tolist() == [0, 0, 1]
    torch.testing.assert_close(batch.shares, torch.tensor([0.7, 0.3, 1.0]))
    text = toy_text()
    wanted = [[text.cls_id, *text([one]).text_ids[0, 1:2].tolist(), text.sep_id]
              for one in ("yes", "left", "green")]  # fmt: skip
    assert batch.answer_ids.tolist() == wanted
    assert batch.pixels.shape == (2, 3, 16, 16)
    assert batch.valid.tolist() == [True, True]


def test_questions_of_a_test_set_have_no_answers(tmp_path):
    annotation = Annotation(questions=[question(1, "is it red?", {})])
    own = questions(write_shards(tmp_path, [(photo(), annotation)]))
    batch = own.collate([made(own, 0)])
    assert batch.answer_ids.shape[0] == 0
    assert batch.valid.tolist() == [True]


def test_answers_are_cut(tmp_path):
    annotation = Annotation(questions=[question(1, "is it?", {"a plain green image": 1})])
    own = questions(write_shards(tmp_path, [(photo(), annotation)]), max_answer=4)
    ids = own.collate([made(own, 0)]).answer_ids
    assert ids.shape == (1, 4)
    assert ids[0, -1] == own.answer_text.sep_id


def test_bad_questions_are_skipped_and_named_in_training(tmp_path):
    good = question(0, "is it red?", {"yes": 10})
    samples = [
        (photo(), Annotation(questions=[good])),
        (photo(), Annotation(questions=[question(1, "is it blue?", {})])),
        (photo(), Annotation(questions=[question(2, "is it blue?", {" ": 3, "no": 0})])),
        (photo(), Annotation(questions=[question(3, "  ", {"no": 3})])),
        (b"no image", Annotation(questions=[question(4, "is it blue?", {"no": 1})])),
        (photo(), Annotation(caption="no question at all")),
    ]
    own = questions(write_shards(tmp_path, samples))
    assert len(own.items) == 5
    values = {"train": [str(tmp_path)], "canonical_streams": 1, "max_skipped_share": 1.0}
    data = own.batches(VqaDataConfig.model_validate(values), 5, seed=0)
    ((batch, _),) = data.batches(stop_after=1)
    assert batch.valid.tolist() == [True]
    kinds = sorted(skip.kind for skip in batch.skipped)
    assert kinds == ["no answers", "no answers", "no text", "unreadable image"]
    assert any("nobody answered 1" in skip.where for skip in batch.skipped)


def test_images_are_not_mirrored_where_an_answer_names_a_side(tmp_path):
    half = Image.new("RGB", (16, 16))
    half.paste((255, 255, 255), (0, 0, 8, 16))
    data = BytesIO()
    half.save(data, "PNG")
    annotation = Annotation(
        questions=[question(0, "is it red?", {"left": 1}), question(1, "is it red?", {"no": 1})]
    )
    own = questions(write_shards(tmp_path, [(data.getvalue(), annotation)]), hflip=True)
    samples = IndexedSamples(own.train, 0)

    def seen(number):
        asked = [samples[Request(epoch, Element(0, 0, number, 0))] for epoch in range(12)]
        return {float(one.pixels[0, 0, 0]) for one in asked}

    assert len(seen(0)) == 1
    assert len(seen(1)) == 2


class TestAnswers:
    def test_answers_of_a_question_are_added_up(self):
        asked = question(0, "is it?", {"yes": 2, " yes ": 3, "": 4, "no": 0})
        assert answers_of(asked) == {"yes": 5}

    def test_the_most_frequent_come_first(self, shards):
        found = frequent_answers([shards], 100)
        # 2 of 6 images have each colour: 20 people a colour, 14 yes, 28 no, 18 left.
        assert found == ("no", "blue", "green", "red", "left", "yes")
        assert frequent_answers([shards, shards], 2) == ("no", "blue")

    def test_published_lists(self, shared):
        folder = shared / "data_tasks"
        found = read_answers(folder / "vqa_v2" / "answers_3129_label2ans.json")
        assert len(found) == 3128  # the first of the 3,129 is blank
        assert len(read_answers(folder / "easy_vqa" / "answers.txt")) == 13

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.json", '{"yes": 1}', "a JSON list of texts"),
            ("a.json", "[", "cannot be read"),
            ("a.txt", "\n \n", "is empty"),
        ],
    )
    def test_bad_lists(self, tmp_path, name, content, message):
        file = tmp_path / name
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_answers(file)
        with pytest.raises(ConfigError, match=r"no\.txt.*cannot be read"):
            read_answers(tmp_path / "no.txt")

    @pytest.mark.parametrize("name", ["a.txt", "a.json"])
    def test_byte_order_marks_and_repeated_answers_do_not_count(self, tmp_path, name):
        content = '["yes", "no", " yes"]' if name.endswith("json") else "yes\r\n\ufeffno\r\nyes"
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert read_answers(tmp_path / name) == ("yes", "no")


def folder(shared):
    return shared / "data_tasks" / "vqa_v2"


def by_leaving_out(prediction, people):
    """The definition, one person after another; for answers that need no normalisation."""
    parts = []
    for number in range(len(people)):
        others = people[:number] + people[number + 1 :]
        parts.append(min(1.0, others.count(prediction) / ENOUGH))
    return sum(parts) / len(parts)


def test_normalisation_of_real_answers(shared):
    pairs = json.loads((folder(shared) / "eval_check" / "normalisation_pairs.json").read_text())
    assert len(pairs) == 3000
    assert [pair for pair in pairs if normalise_answer(pair[0]) != pair[1]] == []


@pytest.mark.parametrize("version", ["official", "albef_copy"])
def test_the_evaluators_figures(shared, version):
    place = folder(shared)
    with gzip.open(place / "annotations_test.json.gz") as file:
        questions = {one["question_id"]: one for one in json.load(file)["annotations"]}
    expected = json.loads((place / "eval_check" / "expected_accuracy.json").read_text())[version]
    results = json.loads((place / "eval_check" / "results.json").read_text())
    values = []
    for row in results:
        question = questions[row["question_id"]]
        said = Counter(one["answer"] for one in question["answers"])
        values.append(100 * vqa_accuracy(row["answer"], list(said.items()), version))
    assert round(sum(values) / len(values), 4) == expected["overall"]
    found = {str(row["question_id"]): round(value, 4) for row, value in zip(results, values)}
    assert found == expected["perQuestion"]


@given(st.lists(st.sampled_from(["red", "blue", "green"]), min_size=4, max_size=12))
def test_counts_are_people(people):
    for prediction in ("red", "black"):
        found = vqa_accuracy(prediction, list(Counter(people).items()))
        assert found == pytest.approx(by_leaving_out(prediction, people))


@pytest.mark.parametrize(
    ("agree", "other", "value"),
    [(1, 0, 1), (0, 1, 0), (2, 0, 1), (1, 1, 1 / 2), (3, 0, 1), (2, 1, 2 / 3), (1, 2, 1 / 3),
     (4, 0, 1), (3, 1, 3 / 4), (2, 2, 1 / 2)],
)  # fmt: skip
def test_few_people(agree, other, value):
    answers = [("yes", agree), ("no", other)]
    assert vqa_accuracy("yes", answers) == pytest.approx(value)


def test_the_versions_differ_where_all_agree():
    agreed = [("the yes", 10)]
    assert vqa_accuracy("The Yes", agreed) == 1  # as they said, but for case
    assert vqa_accuracy("yes", agreed) == 0
    assert vqa_accuracy("the yes", agreed, "albef_copy") == 0  # predictions alone lose articles
    assert vqa_accuracy("a yes!", [("yes", 10)], "albef_copy") == 1
    assert vqa_accuracy("a yes!", [("yes", 10)]) == 0
    assert vqa_accuracy("two", [("two", 9), ("2", 1)]) == 1
    assert vqa_accuracy("two", [("two", 9), ("2", 1)], "albef_copy") == pytest.approx(0.3)


def test_answers_that_nobody_gave_do_not_count():
    assert vqa_accuracy("red", [("red", 4), ("blue", 0)]) == 1
    with pytest.raises(ValueError, match="nobody answered"):
        vqa_accuracy("red", [("red", 0)])
    with pytest.raises(ValueError, match="unknown version 'new'"):
        vqa_accuracy("red", [("red", 1)], "new")
