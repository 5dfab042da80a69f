import re
import time
from math import prod

import pytest
import torch
from torch.testing import assert_close

import vlp
from data_tools.feature_writer import feature_writer
from launch.align import SHRINKAGES, _ValidationPairs, align
from launch.cli.main import main
from launch.pretrain import build
from vlp.config import ConfigError, load_config
from vlp.data.text.tokenizer import TextProcessor
from vlp.io import check_hub
from vlp.lock import FolderLock
from vlp.models.image_encoder import ImageEncoder
from vlp.objectives.canonical_correlation import (
    CanonicalCorrelation,
    PairMoments,
    mean_reciprocal_rank,
)
from vlp.training.config import PretrainConfig

POOLED = ("model.image.pooling=cls+mean", "model.text.pooling=cls+mean")


def settings(lab, *more):
    _, path, *overrides = lab.arguments("aligned", *POOLED, "training.precision=float32", *more)
    return load_config(path, PretrainConfig, overrides)


def similarity(config, model):
    _, data = build(config)
    batch = next(data.batches())[0].to("cpu")
    with torch.no_grad():
        text = model.encode_text(batch.text_ids, batch.attention_mask, batch.word_mask)
        return text.feature @ model.encode_image(batch.pixels).feature.T


def test_the_folder_ranks_pairs_above_chance_and_pretraining_starts_from_it(lab, tmp_path):
    config = settings(lab)
    count, _ = align(config, tmp_path / "model", epochs=2)
    assert count == 400
    model = vlp.load(tmp_path / "model").model
    assert model.image_encoder.projection.in_features == 64
    cosines = similarity(config, model)
    # Trained on these very pairs, two random encoders hold enough to tell them apart.
    own, others = cosines.diagonal().mean(), cosines.mean()
    assert own > others + 0.2
    untrained = similarity(config, build(config)[0].model.eval())
    assert own - others > untrained.diagonal().mean() - untrained.mean() + 0.2
    started, _ = build(settings(lab, f"init_from={tmp_path / 'model'}"))
    assert torch.equal(started.model.image_tokens.weight, model.image_tokens.weight)


def test_what_all_tokens_share_is_projected_to_zero(lab, tmp_path):
    _, model = align(settings(lab), tmp_path / "model")
    rank = torch.linalg.matrix_rank(model.text_tokens.weight)
    assert rank < min(model.text_tokens.weight.shape)


def test_a_frozen_tower_sees_every_image_once_and_plain(lab, tmp_path, monkeypatch, capsys):
    """As from features that were stored before; the folder of its own goes in the end."""
    values = towers_images(monkeypatch)
    frozen = ("model.image.trainable=0", "objectives.mim=null", "data.captions=all")
    config = settings(lab, *frozen)
    (tmp_path / "model" / "features").mkdir(parents=True)
    (tmp_path / "model" / "features" / "mine.txt").write_text("of the user")
    images = sum(source.shards.total for source in build(config)[1].indices)
    values.clear()
    _, model = align(config, tmp_path / "model")
    assert sum(values) == images + 1  # and a blank one, which tells the features' size
    size = 2 * images * (1 + prod(config.model.image.grid)) * config.model.image.width
    assert f"features: {size / 1e9:.2g} GB" in capsys.readouterr().out
    assert not (tmp_path / "model" / ".features").exists()
    assert (tmp_path / "model" / "features" / "mine.txt").read_text() == "of the user"
    writer = feature_writer(config, tmp_path / "features", dtype="bfloat16")
    writer.write(8, 0)
    stored = settings(lab, *frozen, f"data.features={tmp_path / 'features'}")
    _, other = align(stored, tmp_path / "other")
    assert_close(model.image_encoder.projection.weight, other.image_encoder.projection.weight)


def test_an_interrupted_command_goes_on_from_its_features(lab, tmp_path, monkeypatch):
    config = settings(lab, "model.image.trainable=0", "objectives.mim=null", "data.captions=all")
    with monkeypatch.context() as patch:
        patch.setattr("launch.align.CanonicalCorrelation", interrupted)
        with pytest.raises(KeyboardInterrupt):
            align(config, tmp_path / "model")
    values = towers_images(monkeypatch)
    align(config, tmp_path / "model")
    assert values == [1]  # the blank one, which tells the features' size
    assert (tmp_path / "model" / "model.safetensors").is_file()


def towers_images(monkeypatch):
    values, tower = [], ImageEncoder.tower

    def counted(self, pixels, *more):
        values.append(len(pixels))
        return tower(self, pixels, *more)

    monkeypatch.setattr(ImageEncoder, "tower", counted)
    return values


def interrupted(*arguments):
    raise KeyboardInterrupt


def test_the_command_says_what_it_did(lab, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    arguments = lab.arguments("aligned", *POOLED, "training.precision=bf16")
    assert main(["align", *arguments, "--out", str(tmp_path / "model")]) == 0
    message = capsys.readouterr()
    assert "aligned on 200 pairs" in message.out
    assert "training.precision: this CPU has no instructions for bf16" in message.err
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert main(["align", *arguments, "--out", str(tmp_path / "model")]) == 2
    assert "already holds a model" in capsys.readouterr().err
    with FolderLock(tmp_path / "other"):
        assert main(["align", *arguments, "--out", str(tmp_path / "other")]) == 2
    assert "is being written by process" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def noisy_pairs(count, seed=0):
    """Pairs of 60 channels, of which 4 strong and 16 weak ones agree in part; four an image."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(count // 4, 20, generator=generator).repeat_interleave(4, 0)
    strength = torch.tensor([2.0] * 4 + [0.2] * 16)
    sides = []
    for _ in range(2):
        own = 0.6 * torch.randn(count, 20, generator=generator)
        noise = torch.randn(count, 40, generator=generator)
        sides.append(torch.cat([(shared + own) * strength, noise], 1))
    ids = torch.stack([torch.arange(count) // 4, torch.arange(count)], 1)
    return (*sides, ids)


def test_held_out_images_choose_more_shrinkage_for_fewer_pairs():
    held_out = noisy_pairs(400, seed=1)
    chosen = {}
    for count in (80, 40_000):
        values, held = PairMoments(60, 60), _ValidationPairs(60, 60)
        values.add(*noisy_pairs(count)[:2])
        for part in range(2):  # added in parts
            held.add(*(side[part::2] for side in held_out))
        chosen[count] = held.best_shrinkage(values, 20)
        ranks = {}
        for shrinkage in SHRINKAGES:
            layers = CanonicalCorrelation(values).projections(20, shrinkage)
            x, y = (s.double() @ p.weight.T + p.bias for s, p in zip(held_out, layers))
            ranks[shrinkage] = mean_reciprocal_rank(x, y, held_out[2])
        assert ranks[chosen[count]] == max(ranks.values())
    assert chosen[80] > chosen[40_000]


def test_held_out_images_count_in_the_projections_again(lab, tmp_path, capsys):
    count, result = align(settings(lab), tmp_path / "found")
    assert count == 200
    (chosen,) = re.findall(
        r"shrinkage (\S+) ranks the pairs of \d+ held-out", capsys.readouterr().out
    )
    _, given = align(settings(lab), tmp_path / "given", shrinkage=float(chosen))
    assert_close(given.image_encoder.projection.weight, result.image_encoder.projection.weight)
    assert not capsys.readouterr().out


def test_towers_are_named_by_two_options(monkeypatch, tmp_path):
    """The text tower's folder has the tokenizer and starts the cross-modal layers, too."""
    calls = []
    monkeypatch.setattr("launch.align.run_align", lambda *given: calls.append(given) or 0)
    words = ["--config", "x.yaml", "--out", str(tmp_path / "out")]
    assert main(["align", *words, "--image-tower", "A", "--text-tower", "B", "k=1"]) == 0
    assert calls[0][-1] == [
        "model.image.weights=A",
        "model.text.weights=B",
        "data.vocabulary=B",
        "model.cross.weights=B",
        "k=1",
    ]


def test_without_a_network_the_hub_is_asked_once(monkeypatch, capsys):
    def refused(*address, **options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("vlp.io.socket.create_connection", refused)
    monkeypatch.setattr("vlp.io.getproxies", dict)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    check_hub.cache_clear()
    started = time.monotonic()
    with pytest.raises(ConfigError, match="nor a name on the hub"):
        TextProcessor.load("nobody/nothing", 8)
    assert time.monotonic() - started < 5
    assert "cannot be reached" in capsys.readouterr().err
    check_hub.cache_clear()
