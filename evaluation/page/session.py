"""Actions of the page with one model: search, predictions, match, Grad-CAM maps, anchors.

Wrong inputs raise EvaluationError, which `evaluation.page.gradio_page` shows in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image

from evaluation.downstream.predict import match_probabilities
from evaluation.downstream.task_evaluation import (
    PageAction,
    get_evaluation,
    load_for_evaluation,
    load_model,
)
from evaluation.encoder import encode_image
from evaluation.grounding.heatmaps import draw_boxes, overlay_anchors, overlay_heatmap, phrase_heat
from evaluation.options import EvalOptions
from evaluation.probes.anchor_maps import map_caption
from evaluation.results import UNTRAINED_MATCH
from evaluation.retrieval.gallery import Gallery
from evaluation.samples import CaptionedSample, EvaluationError, single_line_errors
from evaluation.work_sharding import evaluating, evaluation_autocast
from vlp.data.image.decode import decode_image, upright_rgb
from vlp.data.limits import MAX_IMAGE_BYTES, limits
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample
from vlp.distributed import default_device
from vlp.models.cross_encoder import ImageFeatures
from vlp.models.folder import Loaded
from vlp.precision import NotFiniteError
from vlp.tasks.downstream.task import Downstream, has_task

# An image, or an uploaded file.
ImageInput = Image.Image | str | Path | None

# Pixels of the longer side of an image that the page shows.
DISPLAY_SIDE = 480

# Larger images are reduced to about this multiple of the model's image side.
DECODED_SIDES = 2

# Images cached for the other tabs.
CACHED_IMAGES = 4

# Letters of a text; the tokenizer needs 90 bytes of memory for each.
MAX_TEXT = 100_000

# Images of a search, and the first of them, which the cross-modal encoder re-ranks.
TOP, RERANKED = 8, 4


class EncodedImage:
    """A user's image, upright, RGB and reduced, with cached features."""

    def __init__(
        self, image: ImageInput, min_side: int, loaded: Loaded, device: torch.device
    ) -> None:
        if image is None:
            raise EvaluationError("choose an image first")
        self._loaded, self._device = loaded, device
        # A JPEG is decoded at about the reduced size.
        source = image if isinstance(image, Image.Image) else _read_upload(Path(image), min_side)
        self.image = _reduce(upright_rgb(source), min_side)

    @cached_property
    def features(self) -> ImageFeatures:
        """Return the image encoder's output, a batch of one."""
        return encode_image(self._loaded, self.image, self._device)


class CaptionedImage(NamedTuple):
    """A retrieved image with its caption."""

    image: Image.Image
    text: str


class ModelSession:
    """A model folder, and a `Gallery` of `shards` to search, with its `store`."""

    def __init__(
        self,
        folder: str | Path,
        shards: Sequence[str | Path] = (),
        *,
        limit: int | None = None,
        device: torch.device | str | None = None,
        store: tuple[Path, str] | None = None,
    ) -> None:
        self.name = str(folder)
        self.device = torch.device(device) if device is not None else default_device()
        self._task: Downstream | None = None
        if has_task(folder):
            self._task = load_for_evaluation(folder)
            self.loaded = Loaded(self._task.model, self._task.text, self._task.preprocess)
        else:
            self.loaded = load_model(folder)
        (self._task or self.loaded.model).to(self.device).eval()
        options = EvalOptions(limit, device=self.device, progress=True)
        self.gallery = Gallery(self.loaded, shards, options, store) if shards else None
        self._min_side = max(DISPLAY_SIDE, DECODED_SIDES * self.loaded.preprocess.image_size)
        # A file's time and size, and the limits, are only part of the cache's key.
        self._read = lru_cache(CACHED_IMAGES)(lambda file, *_: self._image(file))

    @property
    def kind(self) -> str | None:
        """Return the fine-tuned task; None for a pretrained model."""
        return None if self._task is None else self._task.kind

    @property
    def action(self) -> PageAction | None:
        """Return the action of the task; None for a pretrained model."""
        return None if self.kind is None else get_evaluation(self.kind).action

    @property
    def image_count(self) -> int:
        """Return the number of images that the task takes."""
        return 1 if self.kind is None else get_evaluation(self.kind).image_count(self._task)[0]

    @property
    def can_match(self) -> bool:
        """Return True if the match score is trained; Grad-CAM also needs that."""
        return self.loaded.model.match_is_trained

    def search(self, text: str) -> list[CaptionedImage]:
        """Return the gallery's best images for a text, best first."""
        assert self.gallery is not None
        # An untrained match score would shuffle the best images.
        rerank = RERANKED if self.can_match else 0
        results = []
        for hit in self.gallery.search(_require_text(text), TOP, rerank):
            label = f"{hit.similarity:.2f}"
            if hit.match is not None:
                label += f" · match {torch.tensor(hit.match).sigmoid():.2f}"
            image = self.gallery.image(hit.image, self._min_side).image
            results.append(CaptionedImage(_reduce(image, self._min_side), label))
        return results

    def act(self, images: Sequence[ImageInput], text: str = "") -> list[tuple[str, float]]:
        """Return predictions of `action` with probabilities, the likeliest first.

        images: `image_count` images. text: ignored by tasks that read no text.
        """
        task, action = self._task, self.action
        assert task is not None
        assert action is not None
        prompt = "" if action.text is None else _require_text(text)
        decoded = [self._open_image(image).image for image in images]
        evaluation = get_evaluation(task.kind)
        with (
            single_line_errors(NotFiniteError),
            torch.no_grad(),
            evaluating(task, self.device),
            evaluation_autocast(self.device, None),
        ):
            return evaluation.predict_item(task, decoded, prompt, self.device)

    def match(self, image: ImageInput, text: str) -> list[tuple[str, float]]:
        """Return the probabilities that a text belongs to an image and that it does not."""
        self._require_match()
        encoded, caption = self._open_image(image), _require_text(text)
        with torch.no_grad(), evaluating(self.loaded.model, self.device):
            # Encode in float32, as maps of other tabs use the cached features as well.
            features = encoded.features
            with single_line_errors(NotFiniteError), evaluation_autocast(self.device, None):
                return match_probabilities(self.loaded, features, caption)

    def ground(self, image: ImageInput, phrase: str) -> tuple[Image.Image, Image.Image]:
        """Return the image, and the image under the Grad-CAM map of a phrase."""
        self._require_match()
        encoded, query = self._open_image(image), _require_text(phrase)
        with evaluating(self.loaded.model, self.device):
            heat = phrase_heat(self.loaded, encoded.features, query)
        plain = draw_boxes(encoded.image, side=DISPLAY_SIDE)
        return plain, overlay_heatmap(plain, heat, side=DISPLAY_SIDE)

    def anchors(self, image: ImageInput, text: str) -> list[CaptionedImage]:
        """Return the image, and a map per word: share of groups in which a patch anchors it."""
        encoded, caption = self._open_image(image), _require_text(text)
        sample = CaptionedSample(encoded.image, [caption], Annotation(), ("", ""))
        with evaluating(self.loaded.model, self.device) as device:
            maps = map_caption(self.loaded, sample, device, encoded.features)
        if not maps.words:
            raise EvaluationError(f"the text {text!r} holds no word")
        plain = draw_boxes(encoded.image)
        words = [
            CaptionedImage(overlay_anchors(plain, word.heat, side=max(plain.size)), word.word)
            for word in maps.words
        ]
        return [CaptionedImage(plain, f"S ≥ {maps.threshold:.2f}"), *words]

    def _require_match(self) -> None:
        if not self.can_match:
            raise EvaluationError(
                f"{self.name}: {UNTRAINED_MATCH}; search and anchors need no match"
            )

    def _open_image(self, image: ImageInput) -> EncodedImage:
        if isinstance(image, (str, Path)) and (file := Path(image)).is_file():
            stat = file.stat()
            return self._read(file, stat.st_mtime_ns, stat.st_size, limits())
        return self._image(image)

    def _image(self, image: ImageInput) -> EncodedImage:
        return EncodedImage(image, self._min_side, self.loaded, self.device)


def _require_text(text: str) -> str:
    if not (text or "").strip():
        raise EvaluationError("type a text first")
    if len(text) > MAX_TEXT:
        raise EvaluationError(f"the text has {len(text):,} letters; at most {MAX_TEXT:,} are read")
    return text.strip()


def _reduce(image: Image.Image, min_side: int) -> Image.Image:
    """Reduce an image to a shorter side of `min_side` pixels; return smaller images unchanged."""
    scale = min_side / min(image.size)
    if scale >= 1:
        return image
    width, height = (round(side * scale) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=2)


def _read_upload(file: Path, min_side: int) -> Image.Image:
    try:
        with file.open("rb") as content:
            return decode_image(content.read(MAX_IMAGE_BYTES + 1), file.name, min_side)
    except (BadSample, OSError) as error:
        raise EvaluationError(f"this image cannot be used: {error}") from error
