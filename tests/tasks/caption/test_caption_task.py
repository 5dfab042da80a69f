"""Captioning: its loss, what it learns, and the folder that it leaves."""

from __future__ import annotations

import pytest
import torch
from question_shards import AUGMENT, coloured, toy_parts, write_shards
from torch.nn import functional

from vlp.tasks.caption.task import CaptionConfig, build
from vlp.tasks.downstream.task import load_task


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


def first_batch(data):
    ((batch, _),) = data.batches(stop_after=1)
    return batch


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


def test_it_learns_to_caption_and_its_folder_does_so_too(shards, tmp_path):
    torch.manual_seed(0)
    task, data = built(shards, batch=12, data={"captions": "one"}, label_smoothing=0.0)
    optimiser = torch.optim.Adam(task.parameters(), 5e-3)
    for step, (batch, _) in enumerate(data.batches(stop_after=80)):
        optimiser.zero_grad()
        task(batch, step).loss.backward()
        optimiser.step()
    task.eval()
    own = task.dataset([shards])
    batch = own.collate([own.make(own.items.read(number), number) for number in range(6)])
    said = task.predict(batch)
    for colour, caption in zip(("red", "green", "blue") * 2, said):
        assert caption in (f"a {colour} picture", f"a plain {colour} one")
    task.save_model(tmp_path, task.state_dict())
    assert load_task(tmp_path).predict(batch) == said
