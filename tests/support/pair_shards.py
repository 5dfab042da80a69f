"""Shards of claims, and a tiny model folder, that tests of downstream tasks share."""

import torch
from tests_support import tiny_config, tiny_text

from vlp.data.image.transforms import Preprocessing
from vlp.data.shards.shard_reader import ShardWriter
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel
from vlp.scenes.annotation import snli_ve_annotation, statement_annotation
from vlp.scenes.nlvr2 import sample_statement
from vlp.scenes.render import encode_png, render
from vlp.scenes.snli_ve import sample_triple


def tiny_folder(folder, **cross):
    """A model folder of width 16 and 16 px images, its position tables not zero."""
    text = tiny_text()
    config = tiny_config(cross=cross)
    torch.manual_seed(0)
    model = VLPModel(config)
    for name, parameter in model.named_parameters():
        if "table" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.anchor_threshold.fill_(0.2)
    model.match_head.bias.data.fill_(0.1)  # as if it were trained; odds stay
    save_pretrained(folder, config, model.state_dict(), text, Preprocessing(16))
    return folder


def entailment_shards(folder, count=12):
    with ShardWriter(folder, samples_per_shard=5) as writer:
        for number in range(count):
            one = sample_triple(0, number, image_size=16)
            writer.write(one.key, encode_png(render(one.scene)), "png", snli_ve_annotation(one))
    return folder


def statement_shards(folder, count=8):
    with ShardWriter(folder, samples_per_shard=5) as writer:
        for number in range(count):
            one = sample_statement(0, number, image_size=16)
            left, right = (encode_png(render(scene)) for scene in (one.left, one.right))
            writer.write(one.key, left, "png", statement_annotation(one), right)
    return folder


def annotated_shards(folder, annotations, image):
    with ShardWriter(folder, samples_per_shard=3) as writer:
        for number, annotation in enumerate(annotations):
            writer.write(f"{number:04d}", image, "png", annotation)
    return folder
