"""Captioned images as items and batches."""

from __future__ import annotations

import torch
from question_shards import AUGMENT, coloured, photo, toy_text, write_shards

from vlp.data.config import AugmentConfig
from vlp.data.downstream.dataset import ImagePreparation
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import Items
from vlp.tasks.caption.data import CaptionDataConfig, CaptionDataset, captions_in


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
