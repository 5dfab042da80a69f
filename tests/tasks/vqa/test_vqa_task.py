"""Question answering: its loss, what it learns, and the folder that it leaves."""

import json

import pytest
import torch
from question_shards import AUGMENT, coloured, photo, toy_parts, write_shards
from tests_support import train

from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.tasks.downstream.task import load_task, start_parts
from vlp.tasks.vqa.task import VqaConfig, build


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("vqa"), coloured(12))


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
    assert "2 of 4 answers have the word pieces of an earlier one" in caplog.text
    assert "'yes' for one" in caplog.text
    assert task._as_listed("10 : 30") == "10:30"
    assert task._as_listed("10 : 31") == "10 : 31"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": {"max_answer": 17}}, "17 tokens are to be written, and the model has 16"),
        ({"data": {"answers": "nowhere.json"}}, "nowhere.json"),
        ({"decoder": {"heads": 5}}, "heads 5"),
        ({"decoder": {"weights": "./no-bert"}}, "task.decoder: .*no-bert"),
    ],
)
def test_what_does_not_fit_is_refused(shards, options, message):
    with pytest.raises(ConfigError, match=message):
        built(shards, **options)


@pytest.mark.parametrize(
    ("decoder", "taken"), [({}, True), ({"start": "none"}, False), ({"layers": 1}, False)]
)
def test_a_decoder_that_was_trained_for_answers_goes_on(shards, tmp_path, decoder, taken):
    before, _ = built(shards)
    before.save_model(tmp_path, before.state_dict())
    torch.manual_seed(1)
    parts, _ = start_parts(str(tmp_path), {})
    task, _ = built(shards, parts, decoder=decoder, data={"answers": None, "most_answers": 2})
    assert len(task.answers) < len(before.answers)
    assert task.take_head(parts) == taken
    same = torch.equal(task.decoder.head.bias, before.decoder.head.bias)
    assert same == taken


def test_questions_of_a_folder_weigh_less(shards, tmp_path):
    half = write_shards(tmp_path / "half", coloured(3))
    weights = {"train": [str(shards), str(half)], "folder_weights": {str(half): 0.5}}
    task, _ = built(shards, data=weights)
    own = task.dataset([shards, half])
    full = len(task.dataset([shards]).items)
    batch = own.collate([own.make(own.items.read(n), n) for n in (0, full - 1, full, full + 1)])
    sums = torch.zeros(4).index_add(0, batch.owners, batch.shares)
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
