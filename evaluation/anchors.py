"""Where the anchors of each word of a caption lie in its picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from evaluation.ranks import default_device
from evaluation.samples import EvaluationError, Sample, Samples
from vlp.data.named_words import named_words, word_positions, word_text
from vlp.models.folder import Loaded
from vlp.positions.anchor import group_similarity

Box = tuple[float, ...]


class WordMap(NamedTuple):
    """One word and, for each patch (rows, columns), the share of channel groups that anchor it.

    box: of the object the word names, in pixels of the picture, where that is known.
    """

    word: str
    heat: NDArray[np.float32]
    box: Box | None = None


class AnchorMap(NamedTuple):
    """A picture, its caption, and one map for each word of the caption."""

    image: Image.Image
    caption: str
    words: list[WordMap]
    threshold: float


def anchor_maps(
    loaded: Loaded,
    shards: Sequence[str | Path],
    *,
    count: int = 4,
    device: torch.device | str | None = None,
) -> list[AnchorMap]:
    """Anchor maps of the first caption of the first `count` usable samples.

    An anchor is a patch, word and channel group whose similarity S (Eq. 3) is at least the model's
    threshold (Eq. 4). A word of several pieces has the mean of their maps.

    Raises:
        EvaluationError: no sample is usable, or the count is below 1.
        ConfigError: a shard folder cannot be read.
    """
    if count < 1:
        raise EvaluationError(f"count {count}: at least one caption is needed")
    device = torch.device(device) if device is not None else default_device()
    samples = Samples(shards)
    training = loaded.model.training
    loaded.model.to(device).eval()
    maps: list[AnchorMap] = []
    try:
        for place in range(len(samples)):
            sample = samples.read(place)
            if isinstance(sample, Sample):
                maps.append(map_caption(loaded, sample, device))
            if len(maps) == count:
                break
    finally:
        loaded.model.train(training)
    if not maps:
        raise EvaluationError(f"{', '.join(samples.folders)}: no usable sample")
    return maps


def map_caption(loaded: Loaded, sample: Sample, device: torch.device) -> AnchorMap:
    """Anchor maps of a sample's first caption."""
    model, caption = loaded.model, sample.captions[0]
    with torch.no_grad():
        image = model.encode_image(loaded.preprocess(sample.image)[None].to(device))
        text = model.encode_text(*(part.to(device) for part in loaded.text([caption])))
        similarity = group_similarity(
            image.tokens.float(), text.tokens.float(), model.config.cross.anchor.groups
        )[0]
    threshold = float(model.anchor_threshold)
    share = (similarity >= threshold).float().mean(-1).cpu().numpy()  # (M, N)
    heat = share.T.reshape(-1, *model.config.image.grid)
    pieces = loaded.text.words(caption)
    boxes = _boxes(sample)
    words = [
        WordMap(word_text(pieces, positions), heat[list(positions)].mean(axis=0), boxes.get(index))
        for index, positions in enumerate(word_positions(pieces))
    ]
    return AnchorMap(sample.image, caption, words, threshold)


def _boxes(sample: Sample) -> dict[int, Box]:
    """Boxes by word of the first caption; none outside the generated corpus."""
    return {word.position: word.box for word in named_words(sample.annotation) if word.caption == 0}
