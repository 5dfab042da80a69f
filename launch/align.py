"""Align two pretrained towers without training: contrastive projections in closed form.

    vlp align --config configs/pretrain/from_towers.yaml --out runs/aligned
    vlp train --config configs/pretrain/from_towers.yaml init_from=runs/aligned

The projections are a regularised canonical correlation analysis of pooled states, on the pairs of a
pretraining configuration; every tenth image is held out to choose the regularisation. The model's
recall is a baseline for training the same towers. A frozen image tower encodes each image once,
unaugmented, if the data repeats images: OUT/.features holds its states until the model is written,
2 bytes for each channel of a token, and an interrupted command resumes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data_tools.feature_writer import feature_writer
from launch.pretrain import build
from vlp import distributed
from vlp.config import ConfigError, load_config
from vlp.data.limits import set_limits
from vlp.data.shards.sample_files import DataError
from vlp.layers.blocks import pool_states
from vlp.lock import FolderLock
from vlp.models.pretrained.local_copy import CONFIG
from vlp.models.vlp import VLPModel
from vlp.objectives.canonical_correlation import (
    Affine,
    CanonicalCorrelation,
    PairMoments,
    mean_reciprocal_rank,
)
from vlp.training.config import PretrainConfig
from vlp.training.engines.environment import prepare_environment, warn_if_emulated

FEATURE_BATCH = 64
SHRINKAGES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# Shrinkage where fewer than `MIN_IMAGES` images are held out.
DEFAULT_SHRINKAGE = 1.0
# Every tenth image is held out to choose the shrinkage; the result is solved on all images.
VALIDATION_INTERVAL = 10
# Limits of the held-out images and pairs that choose the shrinkage.
MIN_IMAGES, MAX_PAIRS = 20, 2000


@torch.no_grad()
def align(
    config: PretrainConfig, out: Path, epochs: int = 1, shrinkage: float | None = None
) -> tuple[int, VLPModel]:
    """Write a model folder with aligned projections; return the number of pairs, and the model.

    Args:
        epochs: passes over the data; each draws another caption with `captions: one`, and another
            augmented view unless the image tower is frozen.
        shrinkage: as in `CanonicalCorrelation.projections`; None: the value that ranks held-out
            pairs best.
    """
    if (out / CONFIG).exists():
        raise ConfigError(f"{out} already holds a model; name another folder")
    if shrinkage is not None and not shrinkage > 0:
        raise ConfigError(f"--shrinkage {shrinkage}: it must be above 0")
    # Before any image is encoded, so that an unusable configuration fails at once.
    task, data = build(config)
    warn_if_emulated("training.precision", config.training.precision)
    num_batches = data.batches_left(0, epochs)
    if not task.model.image_encoder.frozen or not _pays_to_store_features(
        config, data, num_batches
    ):
        return _align(config, task, data, num_batches, out, shrinkage)
    del task, data
    folder = out / ".features"
    is_bf16 = config.training.precision == "bf16"
    writer = feature_writer(
        config, folder, dtype="bfloat16", precision="bf16" if is_bf16 else "float32"
    )
    header = writer.header
    samples = sum(source.samples for source in header.sources)
    size = 2 * samples * header.tokens * header.width  # 2 bytes for each channel of a token
    print(f"{folder}: {size / 1e9:.2g} GB of stored features until the model is written")
    writer.write(FEATURE_BATCH, config.data.workers)
    del writer  # and its model
    data_config = config.data.model_copy(update={"features": str(folder)})
    task, data = build(config.model_copy(update={"data": data_config}))
    result = _align(config, task, data, num_batches, out, shrinkage)
    shutil.rmtree(folder)
    return result


def _pays_to_store_features(config: PretrainConfig, data: Any, num_batches: int) -> bool:
    """Return whether the tower would encode each image more than twice on average."""
    # They are stored already, or an epoch reads a part of the images only.
    if config.data.features is not None or config.data.epoch_samples is not None:
        return False
    images = sum(index.shards.total for index in data.indices)
    return num_batches * config.training.batch > 2 * images


def _align(
    config: PretrainConfig,
    task: Any,
    data: Any,
    num_batches: int,
    out: Path,
    shrinkage: float | None,
) -> tuple[int, VLPModel]:
    """Solve the projections on the first `num_batches` batches, and write the model folder.

    Returns the number of pairs, and the model.
    """
    model: VLPModel = task.model.eval()
    device = distributed.default_device()
    model.to(device)
    image, text = model.image_encoder, model.text_encoder
    sizes = image.projection.in_features, text.projection.in_features
    train_moments, validation_pairs = PairMoments(*sizes), _ValidationPairs(*sizes)
    num_full_texts = torch.zeros((), dtype=torch.int64, device=device)
    stream = data.batches(stop_after=num_batches)
    for batch, _ in tqdm(stream, total=num_batches, unit="batch", leave=False, disable=None):
        inputs = batch.to(device)
        with task.autocast(device):
            image_states = image(inputs.pixels)
            text_states = text(inputs.text_ids, inputs.attention_mask)
        pooled_states = (
            image.pool(image_states.float()),
            pool_states(text_states.float(), config.model.text.pooling, inputs.attention_mask),
        )
        is_validation = inputs.image_ids % VALIDATION_INTERVAL == 0
        train_moments.add(*(states[inputs.valid & ~is_validation] for states in pooled_states))
        validation_pairs.add(
            *(values[inputs.valid & is_validation] for values in (*pooled_states, inputs.pair_ids))
        )
        lengths = inputs.attention_mask[inputs.valid].sum(1)
        num_full_texts += (lengths == config.model.text.max_tokens).sum()
    moments = train_moments + validation_pairs.moments
    try:
        if shrinkage is None:
            shrinkage = validation_pairs.best_shrinkage(train_moments, config.model.embed_dim)
        projections = CanonicalCorrelation(moments).projections(config.model.embed_dim, shrinkage)
    except ValueError as error:
        raise ConfigError(f"data.sources: {error}") from error
    means = moments.mean_and_covariance()[0].split(sizes)
    has_tokens = config.model.token_projection
    token_layers = (model.image_tokens, model.text_tokens) if has_tokens else ()
    for layer, projection in zip((image.projection, text.projection), projections):
        layer.weight.copy_(projection.weight)
        layer.bias.copy_(projection.bias)
    for layer, projection, mean in zip(token_layers, projections, means):
        _init_token_projection(layer, projection, mean)
    task.save_model(out, task.state_dict())
    if num_full_texts:
        share = num_full_texts.item() / moments.count
        print(f"{share:.1%} of the texts have model.text.max_tokens or more and are truncated")
    return moments.count, model


class _ValidationPairs:
    """Held-out pairs: the first `MAX_PAIRS` choose the shrinkage; `moments` are of all pairs."""

    def __init__(self, x_channels: int, y_channels: int) -> None:
        self.moments = PairMoments(x_channels, y_channels)
        self._pairs: list[tuple[Tensor, ...]] = []

    def add(self, x: Tensor, y: Tensor, pair_ids: Tensor) -> None:
        """Add pairs: states x (B, x_channels) and y (B, y_channels), pair_ids (B, 2)."""
        room = max(0, MAX_PAIRS - self.moments.count)
        self._pairs.append(tuple(values[:room].cpu() for values in (x, y, pair_ids)))
        self.moments.add(x, y)

    def best_shrinkage(self, train_moments: PairMoments, channels: int) -> float:
        """Return the value of `SHRINKAGES` that, solved on other images, ranks the pairs best.

        For fewer than `MIN_IMAGES` images it is `DEFAULT_SHRINKAGE`.
        """
        if not self._pairs:
            return DEFAULT_SHRINKAGE
        x, y, pair_ids = (torch.cat(values) for values in zip(*self._pairs))
        if (images := len(pair_ids[:, 0].unique())) < MIN_IMAGES:
            return DEFAULT_SHRINKAGE
        solver = CanonicalCorrelation(train_moments)
        scores = {}
        for shrinkage in SHRINKAGES:
            layers = solver.projections(channels, shrinkage)
            x_features, y_features = (
                states.double() @ layer.weight.T + layer.bias
                for states, layer in zip((x, y), layers)
            )
            scores[shrinkage] = mean_reciprocal_rank(x_features, y_features, pair_ids)
        best = max(scores, key=scores.__getitem__)
        print(f"shrinkage {best:g} ranks the pairs of {images} held-out images best")
        return best


def _init_token_projection(layer: nn.Linear, pooled: Affine, mean: Tensor) -> None:
    """Set the weight (D, width) of `layer`, which has no bias, from the pooled states' projection.

    mean: (channels,) of the pooled states.
    """
    # Pooling `cls+mean` concatenates [CLS] and the mean of tokens: tokens take the weights of the
    # mean, the last channels. No bias subtracts the mean: the weight ignores its direction.
    weight, mean = pooled.weight[:, -layer.in_features :], mean[-layer.in_features :]
    direction = mean / mean.norm().clamp(min=torch.finfo(mean.dtype).tiny)
    layer.weight.copy_(weight - torch.outer(weight @ direction, direction))


def run_align(
    path: Path, out: Path, epochs: int, shrinkage: float | None, overrides: list[str]
) -> int:
    """Align by a configuration file; returns the exit code."""
    prepare_environment()
    config = load_config(path, PretrainConfig, overrides)
    set_limits(config.limits)
    try:
        with FolderLock(out):
            count, model = align(config, out, epochs, shrinkage)
    except DataError as error:
        raise ConfigError(error.plain_message) from error
    print(f"{out}: projections aligned on {count:,} pairs")
    if count < (channels := model.config.embed_dim):
        print(f"warning: {count} pairs are too few for {channels} channels: expect chance recall")
    return 0
