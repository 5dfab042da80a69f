"""Both towers from outside, in re-ranking, in evaluation and in fine-tuning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pair_shards import entailment_shards, statement_shards
from tests_support import TINY_MODEL, tiny_text

import vlp
from evaluation.options import EvalOptions
from evaluation.retrieval.retrieval import evaluate_retrieval
from vlp.config import ConfigError
from vlp.data.image.transforms import Preprocessing
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.stream.batch import Batch
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.models.config import ModelConfig
from vlp.models.decoder import AnswerDecoder, AnswerDecoderConfig, start_decoder
from vlp.models.folder import save_pretrained
from vlp.models.itm_scorer import ITMScorer
from vlp.models.vlp import VLPModel
from vlp.objectives.config import ObjectivesConfig
from vlp.scenes.annotation import annotation
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import distinct_scenes
from vlp.serving.model_card import model_card
from vlp.tasks.downstream.task import start_parts
from vlp.tasks.pair_classification import task as pair_classification
from vlp.tasks.pretraining import Pretraining

TEXT = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32}  # fmt: skip
IMAGE = {
    "architecture": {
        **{"name": "vit_small_patch14_reg4_dinov2", "embed_dim": 24, "depth": 2, "num_heads": 2},
    },
    **{"patch_size": 14, "image_size": 56, "width": 16, "pool": 2},
}
PLAIN = {"randaugment": False, "crop_scale": [1.0, 1.0], "hflip": False}


def tower_folder(folder, text: TextProcessor, deviation=0.3):
    """A model folder of both towers, the image's of 8 tokens more than the pooled grid."""
    tower = {"model_type": "bert", "vocab_size": text.vocab_size, **TEXT}
    sizes = {"architecture": tower, "vocab_size": text.vocab_size, "width": 16, "max_tokens": 24}
    torch.manual_seed(0)
    model = VLPModel(ModelConfig.model_validate(TINY_MODEL | {"text": sizes, "image": IMAGE}))
    for name, parameter in model.named_parameters():
        if deviation and "cross_encoder" in name:
            torch.nn.init.normal_(parameter, std=deviation)
    model.anchor_threshold.fill_(0.1)
    preprocess = Preprocessing(56, *model.config.image.statistics)
    save_pretrained(folder, model.config, model.state_dict(), text, preprocess)
    return folder


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    with ShardWriter(folder, samples_per_shard=8) as writer:
        for number, scene in enumerate(distinct_scenes(0, 9)):
            writer.write(f"{number:05d}", encode_png(render(scene)), "png", annotation(scene))
    texts = [text for scene in distinct_scenes(0, 9) for text in annotation(scene).captions]
    return folder, TextProcessor(train_wordpiece(texts, 200), 24)


@torch.no_grad()
def test_shared_parts_of_scores_are_those_of_the_model(scenes, tmp_path):
    _, text = scenes
    loaded = vlp.load(tower_folder(tmp_path, text))
    images = loaded.model.encode_image(torch.randn(2, 3, 56, 56))
    assert images.tokens.shape == (2, 4, 8)
    texts = loaded.model.encode_text(*text(["a red circle", "a small blue square above a star"]))
    plain = loaded.model.match(images.select(torch.tensor([1, 1])), texts)
    scorer = ITMScorer(loaded.model)
    prepared = scorer.prepare_image(images.select(torch.tensor([1])))
    shared = scorer.match(prepared, scorer.prepare_texts(texts))
    assert plain.std() > 1e-3
    torch.testing.assert_close(shared, plain, rtol=1e-4, atol=1e-4)


def test_retrieval_is_evaluated_and_re_ranked_as_by_hand(scenes, tmp_path):
    shards, text = scenes
    loaded = vlp.load(tower_folder(tmp_path, text))
    report = evaluate_retrieval(
        loaded, [shards], rerank=9, rerank_by="match", options=EvalOptions(batch=4)
    )
    captions, pixels = [], []
    for scene in distinct_scenes(0, 9):
        captions.append(list(annotation(scene).captions))
        pixels.append(loaded.preprocess(render(scene)))
    flat = [caption for own in captions for caption in own]
    owner = np.repeat(np.arange(9), [len(own) for own in captions])
    with torch.no_grad():
        image = loaded.model.encode_image(torch.stack(pixels))
        words = loaded.model.encode_text(*loaded.text(flat))
        scores = torch.stack(
            [
                loaded.model.match(image.select(torch.full((len(flat),), number)), words)
                for number in range(9)
            ]
        ).numpy()
    first = scores.argmax(0) == owner
    found = report.recall(report.stages[-1], "text_to_image", 1)
    assert found.value == pytest.approx(first.mean())


@pytest.mark.parametrize(
    ("kind", "shards"), [("SnliVeConfig", entailment_shards), ("Nlvr2Config", statement_shards)]
)
def test_fine_tuning_learns_above_frozen_towers(kind, shards, tmp_path):
    folder = tower_folder(tmp_path / "start", tiny_text(), deviation=0)
    data = {"train": [str(shards(tmp_path / "train", 4))], "augment": PLAIN, "canonical_streams": 4}
    config = getattr(pair_classification, kind).model_validate({"data": data})
    frozen = {"image": {"trainable": 0}, "text": {"trainable": 0}}
    parts, _ = start_parts(str(folder), frozen)
    task, stream = pair_classification.build(config, parts, 4, 0, "float32")
    task.train()
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    batch, _ = next(iter(stream.batches()))
    trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
    optimiser, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for step in range(60):
        output = task(batch, step)
        losses.append(float(output.loss.detach()))
        optimiser.zero_grad()
        output.loss.backward()
        optimiser.step()
    assert losses[-1] < 0.5 * losses[0]
    towers = ("model.image_encoder.vit.", "model.text_encoder.tower.")
    for name, tensor in task.state_dict().items():
        assert not name.startswith(towers) or torch.equal(tensor, before[name]), name


def test_answers_are_not_written_by_a_tower(tmp_path):
    folder = tower_folder(tmp_path / "start", tiny_text())
    model = vlp.load(folder).model
    decoder = AnswerDecoder(AnswerDecoderConfig(), model.config, torch.nn.Linear(16, 64))
    with pytest.raises(ConfigError, match=r"text\.architecture: answers and captions"):
        start_decoder(decoder, model)


def test_model_card_names_the_towers(tmp_path):
    card = model_card(tower_folder(tmp_path, tiny_text()))
    assert "Texts: 1 layers of `bert` of width 16" in card
    assert "Images: 2 layers of `vit_small_patch14_reg4_dinov2` of width 16" in card


def counted(monkeypatch, vit, passes):
    """Note every pass of a tower."""
    forward = vit.forward_features

    def noted(pixels):
        passes.append(len(pixels))
        return forward(pixels)

    monkeypatch.setattr(vit, "forward_features", noted)


def test_frozen_tower_runs_once_for_student_and_teacher(monkeypatch):
    sizes = TINY_MODEL | {"image": IMAGE | {"trainable": 0}}
    objectives = {"mim": None, "itm": {"group": 4}, "teacher": {"queue": 8}}
    losses = []
    for stored in (False, True):
        torch.manual_seed(0)
        task = Pretraining(
            ModelConfig.model_validate(sizes), ObjectivesConfig.model_validate(objectives), "-"
        )
        passes = []
        for model in (task.model, task.teacher.average.module["model"]):
            counted(monkeypatch, model.image_encoder.vit, passes)
        pixels = torch.randn(4, 3, 56, 56, generator=torch.Generator().manual_seed(5))
        ids, mask, words = tiny_text()(["a red star", "a blue circle", "a square", "a red cross"])
        batch = Batch(
            pixels=task.model.image_encoder.tower(pixels) if stored else pixels,
            text_ids=ids,
            attention_mask=mask,
            word_mask=words,
            mlm_ids=ids,
            mlm_labels=torch.where(words, ids, -100),
            mim_mask=torch.zeros(4, 2, 2, dtype=torch.bool),
            image_ids=torch.arange(4),
            uniform=torch.full((4, 2), 0.5).double(),
            valid=torch.ones(4, dtype=torch.bool),
            sample_ids=torch.arange(4),
        )
        losses.append(task(batch, 0).loss)
        assert passes == [4]
    assert torch.equal(*losses)
