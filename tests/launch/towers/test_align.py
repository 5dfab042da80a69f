"""Aligned projections: a model folder that ranks pairs better than its start, without training."""

from __future__ import annotations

import pytest
import torch
from launch_lab import Lab

import vlp
from launch.cli.align import align
from launch.cli.main import main
from launch.pretrain import build, build_to_train
from vlp.config import ConfigError, load_config
from vlp.layers.pooling import pool_states
from vlp.objectives.contrastive.canonical import PairMoments, canonical_projections
from vlp.training.config import PretrainConfig

POOLED = ("model.image.pooling=cls+mean", "model.text.pooling=cls+mean")


def settings(lab: Lab, *more: str) -> PretrainConfig:
    _, path, *overrides = lab.arguments("aligned", *POOLED, "training.precision=float32", *more)
    return load_config(path, PretrainConfig, overrides)


def similarity(config: PretrainConfig, model: torch.nn.Module) -> torch.Tensor:
    """Cosines of the first captions (rows) with the first images."""
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


def test_both_parts_side_by_side_need_projections_of_tokens(lab):
    with pytest.raises(ConfigError, match=r"cls\+mean needs token_projection"):
        settings(lab, "model.token_projection=false")


def test_the_command_says_what_it_did(lab, tmp_path, capsys):
    arguments = lab.arguments("aligned", *POOLED)
    assert main(["align", *arguments, "--out", str(tmp_path / "model")]) == 0
    assert "aligned on 200 pairs" in capsys.readouterr().out
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert main(["align", *arguments, "--out", str(tmp_path / "model")]) == 2
    assert "already holds a model" in capsys.readouterr().err


@pytest.mark.parametrize("shrinkage", [0.0, -1.0, float("nan")])
def test_shrinkage_must_be_above_zero(lab, tmp_path, shrinkage):
    with pytest.raises(ConfigError, match="must be above 0"):
        align(settings(lab), tmp_path / "model", shrinkage=shrinkage)
    assert not (tmp_path / "model").exists()


def test_projections_of_a_fold_are_those_fitted_without_its_images(lab, tmp_path):
    config = settings(lab, "model.folds=3")
    _, model = align(config, tmp_path / "model")
    _, data = build(config)
    with torch.no_grad():
        pooled = [
            (
                batch.image_ids,
                model.image_encoder.pool(model.image_encoder(batch.pixels)),
                pool_states(
                    model.text_encoder(batch.text_ids, batch.attention_mask),
                    "cls+mean",
                    batch.attention_mask,
                ),
                batch.valid,
            )
            for batch in (
                each[0].to("cpu") for each in data.batches(stop_after=data.batches_left(0, 1))
            )
        ]
    ids, images, texts, valid = (torch.cat(column) for column in zip(*pooled, strict=True))
    folds = ids % 3
    assert {0, 1, 2} == set(folds.tolist())
    for fold in range(3):
        others = valid & (folds != fold)
        moments = PairMoments(images.shape[1], texts.shape[1])
        moments.add(images[others], texts[others])
        for side, found in zip(
            (model.image_folds, model.text_folds),
            canonical_projections(moments, config.model.embed_dim),
            strict=True,
        ):
            # Directions of equal correlation may turn; what cosines are made of may not.
            gram = found.weight.T @ torch.cat([found.weight, found.bias[:, None]], 1)
            own = side.weight[fold].double()
            own = own.T @ torch.cat([own, side.bias[fold].double()[:, None]], 1)
            assert (own - gram).abs().max() < 0.01 * gram.abs().max()
    # Pretraining encodes by them, and starts from the folder with them.
    started, _ = build(
        settings(
            lab, "model.folds=3", f"init_from={tmp_path / 'model'}", "objectives.contrastive=null",
            "objectives.teacher=null",
        )
    )  # fmt: skip
    assert torch.equal(started.model.text_folds.weight, model.text_folds.weight)
    rows = torch.arange(4)
    picked = model.image_folds.feature(images[:4], folds[:4])
    for row in rows.tolist():
        weight, bias = (getattr(model.image_folds, name)[folds[row]] for name in ("weight", "bias"))
        torch.testing.assert_close(picked[row], images[row] @ weight.T + bias)


def test_folds_are_refused_beside_objectives_that_would_train_projections(lab, tmp_path):
    with pytest.raises(ConfigError, match=r"model.folds=0, or set objectives.contrastive=null"):
        build_to_train(settings(lab, "model.folds=2"))
