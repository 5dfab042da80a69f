"""Maps of the anchors, anchor paths and Grad-CAM of each word of a caption over its image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from evaluation.encoder import encode_image, require_finite, warn_if_truncated
from evaluation.grounding.grad_cam import grad_cam, layer_number
from evaluation.samples import CaptionedSample, EvaluationError, Samples, drop_blank_captions
from evaluation.work_sharding import evaluating
from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample
from vlp.data.text.word_boxes import token_positions, word_text, words_with_boxes
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel
from vlp.positions.anchor import group_similarity

# [x, y, width, height] in pixels of the image.
Box = tuple[float, ...]


class WordMap(NamedTuple):
    """A word and its map (rows, columns): share of channel groups in which a patch anchors it."""

    word: str
    heat: NDArray[np.float32]
    # Of objects that the word may name; empty if unknown.
    boxes: Sequence[Box] = ()


class AnchorMap(NamedTuple):
    """An image, its caption, a map per word, and the threshold of anchors."""

    image: Image.Image
    caption: str
    words: list[WordMap]
    threshold: float


class AnchorDetail(NamedTuple):
    """Maps of one image and caption: W words, G channel groups, patches (rows, columns)."""

    image: Image.Image
    caption: str
    # W words as the tokenizer splits them; for each word the boxes of objects that it may name.
    words: list[str]
    boxes: list[Sequence[Box]]
    # (W, G, rows, columns): 1 where S >= threshold (Eq. 4), mean over a word's pieces.
    anchors: NDArray[np.float32]
    # (W, G, rows, columns), G = 0 without ACE-RPE: P of Eq. 7, at least 1, mean over pieces that
    # reach the patch; 0 where not reachable.
    path: NDArray[np.float32]
    reachable: NDArray[np.bool_]
    # (W, rows, columns), unscaled, of cross-modal layer `layer`.
    gradcam: NDArray[np.float32]
    # (rows, columns): Grad-CAM of [CLS].
    gradcam_caption: NDArray[np.float32]
    threshold: float
    layer: int
    num_layers: int
    # Log-odds that the caption describes the image.
    match: float


def anchor_maps(
    loaded: Loaded,
    shards: Sequence[str | Path],
    *,
    count: int = 4,
    device: torch.device | str | None = None,
) -> list[AnchorMap]:
    """Compute anchor maps of the first caption of the first `count` usable samples.

    A patch anchors a word in a channel group if their similarity S (Eq. 3) is at least the model's
    threshold (Eq. 4).
    """
    samples = first_samples(shards, count)
    with evaluating(loaded.model, device) as torch_device:
        return [map_caption(loaded, sample, torch_device) for sample in samples]


def anchor_details(
    loaded: Loaded,
    samples: Sequence[CaptionedSample],
    *,
    layer: int | None = None,
    device: torch.device | str | None = None,
) -> list[AnchorDetail]:
    """Compute anchors, paths and Grad-CAM maps of the first caption of each sample."""
    try:
        layer_index = layer_number(loaded.model, layer)
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    with evaluating(loaded.model, device) as torch_device:
        return [_anchor_detail(loaded, sample, layer_index, torch_device) for sample in samples]


def first_samples(shards: Sequence[str | Path], count: int) -> list[CaptionedSample]:
    """Return the first `count` usable samples of shard folders; fewer if there are fewer."""
    if count < 1:
        raise EvaluationError(f"count {count}: at least one sample is needed")
    samples = Samples(shards)
    usable: list[CaptionedSample] = []
    for index in range(len(samples)):
        sample = drop_blank_captions(samples.read(index))
        if isinstance(sample, CaptionedSample):
            usable.append(sample)
        if len(usable) == count:
            break
    if not usable:
        raise EvaluationError(f"{', '.join(samples.folders)}: no usable sample")
    return usable


def read_pair(file: str | Path, text: str) -> CaptionedSample:
    """Return a sample of an image file, upright by its EXIF orientation, and a caption."""
    try:
        image = decode_image(Path(file).read_bytes(), str(file))
    except OSError as error:
        raise EvaluationError(f"{file}: cannot be read ({error.strerror})") from error
    except BadSample as error:
        raise EvaluationError(str(error)) from error
    return CaptionedSample(image, [text], Annotation(), ("", str(file)))


def map_caption(
    loaded: Loaded,
    sample: CaptionedSample,
    device: torch.device,
    features: ImageFeatures | None = None,
) -> AnchorMap:
    """Compute anchor maps of a sample's first caption.

    features: of the sample's image; None: it is encoded here.
    """
    model, caption = loaded.model, sample.captions[0]
    with torch.no_grad():
        image = features or encode_image(loaded, sample.image, device)
        text = _encode_caption(loaded, sample, device)
        # Mean over channel groups: (N, rows, columns).
        share = _anchors(model, image, text).mean(1).cpu().numpy()
    pieces, boxes = loaded.text.pieces(caption), _boxes(sample)
    # A word of several pieces has the mean of their maps.
    words = [
        WordMap(word_text(pieces, tokens), share[list(tokens)].mean(axis=0), boxes.get(index, ()))
        for index, tokens in enumerate(token_positions(pieces))
    ]
    return AnchorMap(sample.image, caption, words, float(model.anchor_threshold))


def _anchor_detail(
    loaded: Loaded, sample: CaptionedSample, layer: int, device: torch.device
) -> AnchorDetail:
    model, caption = loaded.model, sample.captions[0]
    pieces = loaded.text.pieces(caption)
    word_pieces = [list(tokens) for tokens in token_positions(pieces)]
    with torch.no_grad():
        image = encode_image(loaded, sample.image, device)
        text = _encode_caption(loaded, sample, device)
        if not text.word_mask.any():
            raise EvaluationError(f"the text {caption!r} holds no word")
        warn_if_truncated(loaded.text, caption)
        anchors = _anchors(model, image, text).cpu()
        path, reachable = (part.cpu() for part in _paths(model, image, text))
        match = float(model.match(image, text))
    gradcam = grad_cam(model, image, text, layer)[0].float().cpu()
    boxes = _boxes(sample)
    return AnchorDetail(
        image=sample.image,
        caption=caption,
        words=[word_text(pieces, tokens) for tokens in token_positions(pieces)],
        boxes=[boxes.get(index, ()) for index in range(len(word_pieces))],
        anchors=torch.stack([anchors[tokens].mean(0) for tokens in word_pieces]).numpy(),
        path=torch.stack(
            [path[tokens].sum(0) / reachable[tokens].sum(0).clamp(min=1) for tokens in word_pieces]
        ).numpy(),
        reachable=torch.stack([reachable[tokens].any(0) for tokens in word_pieces]).numpy(),
        gradcam=torch.stack([gradcam[tokens].mean(0) for tokens in word_pieces]).numpy(),
        gradcam_caption=gradcam[0].numpy(),
        threshold=float(model.anchor_threshold),
        layer=layer,
        num_layers=len(model.cross_encoder.layers),
        match=match,
    )


def _encode_caption(loaded: Loaded, sample: CaptionedSample, device: torch.device) -> TextFeatures:
    tokens = (part.to(device) for part in loaded.text(sample.captions[:1]))
    return loaded.model.encode_text(*tokens)


def _anchors(model: VLPModel, image: ImageFeatures, text: TextFeatures) -> Tensor:
    """Return 1 where a patch anchors a token in a channel group, else 0: (N, G, rows, columns)."""
    paths = model.anchor_paths(image, text)
    # Without ACE-RPE, or with constant paths: the similarities that ACE-RPE would compute.
    if paths is not None and "anchor" in model.config.cross.position:
        similarity = paths.similarity[0]
    else:
        groups = model.config.cross.anchor.groups
        similarity = group_similarity(image.tokens.float(), text.tokens.float(), groups)[0]
    require_finite(similarity)
    return _token_maps(model, (similarity >= model.anchor_threshold).float())


def _paths(model: VLPModel, image: ImageFeatures, text: TextFeatures) -> tuple[Tensor, Tensor]:
    """Return `path` and `reachable`, each (N, G, rows, columns); G = 0 without ACE-RPE."""
    paths = model.anchor_paths(image, text)
    if paths is None:
        empty = torch.zeros(text.tokens.shape[1], 0, *model.config.image.grid)
        return empty, empty.bool()
    # Row 0 of `image_path` is [CLS].
    return _token_maps(model, paths.image_path[0, 1:].float()), _token_maps(
        model, paths.reachable[0]
    )


def _token_maps(model: VLPModel, values: Tensor) -> Tensor:
    """Reshape (M, N, G) to (N, G, rows, columns)."""
    return values.permute(1, 2, 0).unflatten(-1, model.config.image.grid)


def _boxes(sample: CaptionedSample) -> dict[int, Sequence[Box]]:
    """Return boxes by word index for words of the first caption with boxes."""
    words = words_with_boxes(sample.annotation)
    return {word.index: word.boxes for word in words if word.caption == 0}
