"""Question answering through transformers' class is the task's own ranking."""

from __future__ import annotations

import pytest
import torch
from question_shards import AUGMENT, coloured, toy_parts, write_shards

import vlp
from vlp.tasks.vqa.task import VqaConfig, build


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder as `vlp finetune vqa` leaves it, with a decoder far from its start."""
    shards = write_shards(tmp_path_factory.mktemp("vqa"), coloured(12))
    data = {"train": [str(shards)], "canonical_streams": 1, "augment": AUGMENT, "max_answer": 6}
    config = VqaConfig.model_validate({"data": data, "decoder": {"layers": 2}})
    task, _ = build(config, toy_parts(), 4, 0, "float32")
    torch.manual_seed(0)
    with torch.no_grad():
        for weights in task.decoder.parameters():
            weights.add_(torch.randn_like(weights) * 0.2)
    place = tmp_path_factory.mktemp("tuned") / "model"
    task.save_model(place, task.state_dict())
    return place, task.eval(), shards


def test_answers_are_the_tasks(tuned, tmp_path):
    folder, task, shards = tuned
    data = task.dataset([shards])
    batch = data.collate([data.make(data.items.read(number), number) for number in range(5)])
    model = vlp.VlpForQuestionAnswering.from_pretrained(folder)
    inputs = {
        "pixel_values": batch.pixels,
        "input_ids": batch.text_ids,
        "attention_mask": batch.attention_mask.long(),
        "word_mask": batch.word_mask,
    }
    with torch.no_grad():
        expected = task.predict(batch)
    best = [rows[0].answer for rows in model.answer(**inputs)]
    assert best == expected
    assert list(model.config.id2label.values()) == list(task.answers)
    logits = model(**inputs).logits
    assert logits.shape == (5, len(task.answers))
    assert (logits.sigmoid() <= 1).all()
    (two,) = model.answer(**{name: one[:1] for name, one in inputs.items()}, top_k=2)
    assert two[0].score >= two[1].score > 0
    (every,) = model.answer(**{name: one[:1] for name, one in inputs.items()}, top_k=50)
    assert len(every) == len(task.answers)
    with pytest.raises(TypeError, match="no argument 'bogus'"):
        vlp.VlpForQuestionAnswering.from_pretrained(folder, bogus=3)
    model.save_pretrained(tmp_path)
    again = vlp.VlpForQuestionAnswering.from_pretrained(tmp_path)
    assert torch.equal(again(**inputs).logits, logits)


def test_auto_classes_find_both_models(tuned):
    from transformers import AutoModel, AutoModelForVisualQuestionAnswering

    folder, _, _ = tuned
    assert isinstance(AutoModel.from_pretrained(folder), vlp.VlpModel)
    answering = AutoModelForVisualQuestionAnswering.from_pretrained(folder)
    assert isinstance(answering, vlp.VlpForQuestionAnswering)


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, "cpu"])
def test_a_device_map_of_one_device_is_taken(tuned, device_map):
    folder, _, _ = tuned
    model = vlp.VlpForQuestionAnswering.from_pretrained(folder, device_map=device_map)
    expected = "cuda" if device_map == "auto" and torch.cuda.is_available() else "cpu"
    assert next(model.parameters()).device.type == expected


def test_one_image_and_several_questions(tuned, photo):
    folder, task, _ = tuned
    model = vlp.VlpForQuestionAnswering.from_pretrained(folder)
    processor = vlp.VlpProcessor.from_pretrained(folder)
    questions, encoded = ["what colour ?", "how many ?"], []
    model.task.model.image_encoder.register_forward_pre_hook(
        lambda _, arguments: encoded.append(len(arguments[0]))
    )
    found = model.answer(**processor(images=photo, text=questions))
    assert encoded == [1]
    each = model(**processor(images=[photo, photo], text=questions)).logits
    torch.testing.assert_close(model(**processor(images=photo, text=questions)).logits, each)
    assert found[0][0].answer in task.answers
    one = model(**processor(images=[photo, photo], text=questions[0])).logits
    torch.testing.assert_close(one, each[:1].expand(2, -1))
    with pytest.raises(ValueError, match="2 images and 3 texts make no pairs"):
        model.answer(**processor(images=[photo, photo], text=["a", "b", "c"]))
    longer = processor.tokenizer(["what colour " * 9], return_tensors="pt")
    assert len(model.answer(**processor(images=photo), **longer)) == 1
