import gzip
import json
from collections import Counter
from io import BytesIO

import pytest
import torch
from PIL import Image
from question_shards import AUGMENT, coloured, photo, question, toy_parts, toy_text, write_shards
from tests_support import train

from vlp.config import ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.downstream.dataset import ImagePreparation
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import Items
from vlp.data.stream.loader import IndexedSamples
from vlp.data.stream.sampler import Request, SampleIndex
from vlp.tasks.downstream.task import load_task, start_parts
from vlp.tasks.vqa.data import (
    VqaDataConfig,
    VqaDataset,
    answers_of,
    frequent_answers,
    questions_in,
    read_answers,
)
from vlp.tasks.vqa.metrics import normalise_answer, vqa_accuracy
from vlp.tasks.vqa.task import VqaConfig, build


def questions(folder, limit=None, max_answer=5, **augment):
    preprocess = Preprocessing(16)
    transform = TrainTransform(AugmentConfig.model_validate(AUGMENT | augment), preprocess)
    prepare = ImagePreparation(transform, preprocess, "image", 4)
    return VqaDataset(Items([folder], questions_in, limit), toy_text(), prepare, max_answer)


def made(own, number):
    return own.make(own.items.read(number), number)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("vqa"), coloured(12))


def test_every_question_is_an_item(shards):
    own = questions(shards)
    assert len(own.items) == 24
    asked = [made(own, number) for number in range(12)]
    assert [one.question.id for one in asked[:4]] == ["0", "1", "10", "11"]
    assert asked[3].answers == {"no": 7, "left": 3}
    assert asked[2].types == {"answer": "other", "question": "what"}
    assert torch.equal(asked[0].pixels, asked[1].pixels)
    assert not torch.equal(asked[0].pixels, asked[2].pixels)


def test_a_batch_holds_all_answers_with_their_shares(shards):
    own = questions(shards)
    batch = own.collate([made(own, 1), made(own, 2)])
    assert batch.question_index.tolist() == [0, 0, 1]
    torch.testing.assert_close(batch.answer_weights, torch.tensor([0.7, 0.3, 1.0]))
    text = toy_text()
    wanted = [[text.cls_id, *text([one]).text_ids[0, 1:2].tolist(), text.sep_id]
              for one in ("yes", "left", "green")]  # fmt: skip
    assert batch.answer_ids.tolist() == wanted
    assert batch.pixels.shape == (2, 3, 16, 16)
    assert batch.valid.tolist() == [True, True]


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
    assert any("question 1 has no answer" in skip.where for skip in batch.skipped)


def test_images_are_not_mirrored_where_an_answer_names_a_side(tmp_path):
    half = Image.new("RGB", (16, 16))
    half.paste((255, 255, 255), (0, 0, 8, 16))
    data = BytesIO()
    half.save(data, "PNG")
    annotation = Annotation(
        questions=[question(0, "is it red?", {"left": 1}), question(1, "is it red?", {"no": 1})]
    )
    own = questions(write_shards(tmp_path, [(data.getvalue(), annotation)]), hflip=True)
    samples = IndexedSamples(own.training_example, 0)

    def seen(number):
        asked = [samples[Request(epoch, SampleIndex(0, 0, number, 0))] for epoch in range(12)]
        return {float(one.pixels[0, 0, 0]) for one in asked}

    assert len(seen(0)) == 1
    assert len(seen(1)) == 2


class TestAnswers:
    def test_answers_of_a_question_are_added_up(self):
        asked = question(0, "is it?", {"yes": 2, " yes ": 3, "": 4, "no": 0})
        assert answers_of(asked) == {"yes": 5}

    def test_the_most_frequent_come_first(self, shards):
        found = frequent_answers([shards], 100)
        # 4 of 12 images have each colour: 40 people a colour, 28 yes, 56 no, 36 left.
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
            ("a.json", '{"yes": 1}', "a JSON list of strings"),
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


def test_normalisation_of_real_answers(shared):
    place = shared / "data_tasks/vqa_v2/eval_check"
    pairs = json.loads((place / "normalisation_pairs.json").read_text())
    assert len(pairs) == 3000
    assert [pair for pair in pairs if normalise_answer(pair[0]) != pair[1]] == []


@pytest.mark.parametrize("version", ["official", "albef_copy"])
def test_the_evaluators_figures(shared, version):
    place = shared / "data_tasks/vqa_v2"
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


@pytest.mark.parametrize(
    ("agree", "other", "value"),
    [(1, 0, 1), (0, 1, 0), (2, 0, 1), (1, 1, 1 / 2), (3, 0, 1), (2, 1, 2 / 3), (1, 2, 1 / 3),
     (4, 0, 1), (3, 1, 3 / 4), (2, 2, 1 / 2), (3, 7, 0.9), (2, 8, 0.6)],
)  # fmt: skip
def test_few_people(agree, other, value):
    answers = [("yes", agree), ("no", other)]
    assert vqa_accuracy("yes", answers) == pytest.approx(value)


def test_answers_that_nobody_gave_do_not_count():
    assert vqa_accuracy("red", [("red", 4), ("blue", 0)]) == 1
    with pytest.raises(ValueError, match="no answer to compare"):
        vqa_accuracy("red", [("red", 0)])


def config(shards, decoder=(), data=(), **options):
    values = {
        "data": {"train": [str(shards)], "canonical_streams": 1, "augment": AUGMENT,
                 "max_answer": 6, **dict(data)},
        "decoder": {"layers": 2, **dict(decoder)},
        **options,
    }  # fmt: skip
    return VqaConfig.model_validate(values)


def built(shards, parts=None, batch=8, **options):
    return build(config(shards, **options), parts or toy_parts(), batch, 0, "float32")


def collated(task, shards, numbers):
    own = task.dataset([shards])
    return own.collate([own.make(own.items.read(number), number) for number in numbers])


class TestTask:
    @pytest.fixture(scope="class")
    def trained(self, shards):
        """100 steps on the 24 questions, which are two kinds."""
        torch.manual_seed(0)
        task, data = built(shards, batch=24)
        outputs = train(task, data, 100, 5e-3)
        return task.eval(), [output.loss.item() for output in outputs]

    def test_it_learns_to_answer(self, trained, shards):
        task, losses = trained
        # Where three of ten say something else, 0.61 nats of every second question remain.
        assert 0.3 < losses[-1] < 1.2 < losses[0]
        wanted = ["red", "yes", "green", "no", "blue", "no"]
        batch = collated(task, shards, range(6))
        assert task.predict(batch) == wanted
        assert task.predict(batch, "generate") == wanted

    @pytest.mark.parametrize("key", ["layers", "intermediate"])
    def test_sizes_that_the_heads_weights_are_not_of_are_refused(self, trained, tmp_path, key):
        task, _ = trained
        task.save_model(tmp_path, task.state_dict())
        said = json.loads((tmp_path / "task.json").read_text())
        said["task"]["decoder"][key] = 10**9
        (tmp_path / "task.json").write_text(json.dumps(said))
        with pytest.raises(ConfigError, match=r"task\.json: .*weights"):
            load_task(tmp_path)


def test_the_decoder_starts_from_the_cross_encoder_and_its_output_from_the_head(shards):
    parts = toy_parts()
    task, _ = built(shards, parts)
    for number in range(2):
        own = task.decoder.layers[number].feed_forward.expand.weight
        theirs = parts.model.cross_encoder.layers[number].feed_forward.expand.weight
        assert torch.equal(own, theirs)
    assert torch.equal(task.decoder.head.bias, parts.heads["mlm_head.bias"])
    for options in ({"parts": toy_parts(heads=False)}, {"decoder": {"start": "none"}}):
        fresh, _ = built(shards, **options)
        assert fresh.decoder.head.bias.eq(0).all()


def test_answers_that_the_tokenizer_does_not_tell_apart_are_one(shards, tmp_path, caplog):
    file = tmp_path / "answers.txt"
    file.write_text("10:30\nYes\nyes\n10 : 30\n")
    task, _ = built(shards, data={"answers": str(file), "max_answer": 12})
    assert task.answers == ("10:30", "Yes")
    assert "2 of 4 answers have the word pieces of an earlier answer" in caplog.text
    assert "for example 'yes'" in caplog.text
    assert task._listed_spelling("10 : 30") == "10:30"
    assert task._listed_spelling("10 : 31") == "10 : 31"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": {"max_answer": 17}}, "17 tokens need as many positions, but the model has 16"),
        ({"data": {"answers": "nowhere.json"}}, "nowhere.json"),
        ({"decoder": {"heads": 5}}, "heads 5"),
        ({"decoder": {"weights": "./no-bert"}}, "task.decoder: .*no-bert"),
    ],
)
def test_what_does_not_fit_is_refused(shards, options, message):
    with pytest.raises(ConfigError, match=message):
        built(shards, **options)


@pytest.mark.parametrize(
    ("trained", "decoder", "taken"),
    [
        *(({}, changes, not changes) for changes in ({}, {"start": "none"}, {"layers": 1})),
        *(({"heads": 1, "start": "none"}, {"heads": heads}, heads == 1) for heads in (1, None)),
    ],
)
def test_a_decoder_that_was_trained_for_answers_goes_on(shards, tmp_path, trained, decoder, taken):
    before, _ = built(shards, decoder=trained)
    torch.nn.init.normal_(before.decoder.head.bias)
    before.save_model(tmp_path, before.state_dict())
    parts, _ = start_parts(str(tmp_path), {})
    task, _ = built(shards, parts, decoder=decoder, data={"answers": None, "most_answers": 2})
    assert len(task.answers) < len(before.answers)
    assert task.load_head(parts) == taken
    same = torch.equal(task.decoder.head.bias, before.decoder.head.bias)
    assert same == taken


def test_questions_of_a_folder_weigh_less(shards, tmp_path):
    half = write_shards(tmp_path / "half", coloured(3))
    weights = {"train": [str(shards), str(half)], "folder_weights": {str(half): 0.5}}
    task, _ = built(shards, data=weights)
    own = task.dataset([shards, half])
    full = len(task.dataset([shards]).items)
    batch = own.collate([own.make(own.items.read(n), n) for n in (0, full - 1, full, full + 1)])
    sums = torch.zeros(4).index_add(0, batch.question_index, batch.answer_weights)
    torch.testing.assert_close(sums, torch.tensor([1, 1, 0.5, 0.5]))
    with pytest.raises(ConfigError, match="folder_weights: gone is no folder of `train`"):
        built(shards, data={"folder_weights": {"gone": 0.5}})


def test_shards_without_questions(tmp_path):
    write_shards(tmp_path, [(photo(), Annotation(caption="a red picture"))])
    with pytest.raises(ConfigError, match="no question in these shards is answered"):
        built(tmp_path)
    file = tmp_path / "answers.txt"
    file.write_text("yes\n")
    with pytest.raises(ConfigError, match="nothing to read in these shards"):
        built(tmp_path, data={"answers": str(file)})
