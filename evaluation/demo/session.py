"""What one can try of a model by hand: search, answers, captions, judgements, maps, anchors.

Images come in as they are and texts as they are typed; every mistake of the person who tries is
an EvaluationError with a line to show. The page around it is `evaluation.demo.page`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from PIL import Image

import vlp
from evaluation.core.eval_mode import evaluating
from evaluation.core.samples import CaptionedSample, EvaluationError
from evaluation.downstream import predict_one
from evaluation.downstream.predict import has_task
from evaluation.grounding.heatmaps import anchors_over, framed, heat_over
from evaluation.grounding.phrase_map import phrase_heat
from evaluation.probes.anchor_maps import map_caption
from evaluation.retrieval.gallery import Gallery
from vlp.data.image.decode import upright_rgb
from vlp.data.schema import Annotation
from vlp.distributed import default_device
from vlp.models.folder import Loaded
from vlp.tasks.downstream.caption import CaptionTask
from vlp.tasks.downstream.pair_classification import PairClassification
from vlp.tasks.downstream.task import Downstream, load_task
from vlp.tasks.downstream.vqa import Vqa

Answer = TypeVar("Answer")

MAX_SIDE = 1024
"""Larger images are made smaller first: a model reads a few hundred pixels."""


class CaptionedImage(NamedTuple):
    """An image that a search found, and what is said of it."""

    image: Image.Image
    text: str


class TryIt:
    """A model folder, and perhaps images to search.

    `name` is the folder's; `kind` the task it was fine-tuned for, or None.

    Args:
        folder: model folder or hub name.
        shards: folders whose images are searched; they are all encoded now.
        limit: only the first so many samples.
        device: where to compute; None is this rank's GPU, or the CPU.

    Raises:
        EvaluationError: the folder is damaged, or nothing in the shards can be used.
        ConfigError: a shard folder cannot be read.
        FileNotFoundError: there is no such model.
    """

    def __init__(
        self,
        folder: str | Path,
        shards: Sequence[str | Path] = (),
        *,
        limit: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.name = str(folder)
        self.device = torch.device(device) if device is not None else default_device()
        self._task: Downstream | None = None
        try:
            if has_task(folder):
                self._task = load_task(folder)
                self.loaded = Loaded(self._task.model, self._task.text, self._task.preprocess)
            else:
                self.loaded = vlp.load(str(folder))
        except ValueError as error:
            raise EvaluationError(" ".join(str(error).split())) from error
        (self._task or self.loaded.model).to(self.device).eval()
        self.gallery = (
            Gallery(self.loaded, shards, limit=limit, device=self.device) if shards else None
        )

    @property
    def kind(self) -> str | None:
        """The task it was fine-tuned for."""
        return None if self._task is None else self._task.kind

    @property
    def answers_questions(self) -> bool:
        """Whether `answer` works."""
        return isinstance(self._task, Vqa)

    @property
    def writes_captions(self) -> bool:
        """Whether `caption` works."""
        return isinstance(self._task, CaptionTask)

    @property
    def images_judged(self) -> int:
        """How many images `judge` takes, 0 where it does not work."""
        return (
            predict_one.images_of(self._task)[0]
            if isinstance(self._task, PairClassification)
            else 0
        )

    def search(self, text: str, top: int = 8, rerank: int = 16) -> list[CaptionedImage]:
        """Images of the shards that fit a text, the best first, re-ranked by the cross encoder.

        Of each the similarity is said, and the probability of a match where that was asked.

        Raises:
            EvaluationError: the text holds no word, or there are no shards.
        """
        if self.gallery is None:
            raise EvaluationError("there is nothing to search: start the page with --shards DIR")
        gallery = self.gallery
        found = []
        for hit in gallery.search(_said(text), top, rerank):
            words = f"{hit.similarity:.2f}"
            if hit.match is not None:
                words += f" · match {torch.tensor(hit.match).sigmoid():.2f}"
            found.append(CaptionedImage(gallery.image(hit.image).image, words))
        return found

    def answer(self, image: Image.Image | None, question: str) -> list[tuple[str, float]]:
        """The answer to a question about an image, with its probability.

        Raises:
            EvaluationError: there is no image or question, or the model was not trained for it.
        """
        task, seen, asked = self._task, _seen(image), _said(question)
        if not isinstance(task, Vqa):
            raise self._wrong_task("answer questions", "vqa")
        return [self._with(lambda: predict_one.answer_of(task, [seen], asked, self.device))]

    def caption(self, image: Image.Image | None) -> list[tuple[str, float]]:
        """A caption for an image, with its probability.

        Raises:
            EvaluationError: there is no image, or the model was not trained for it.
        """
        task, seen = self._task, _seen(image)
        if not isinstance(task, CaptionTask):
            raise self._wrong_task("write captions", "caption")
        return [self._with(lambda: predict_one.caption_of(task, [seen], self.device))]

    def judge(self, images: Sequence[Image.Image | None], text: str) -> list[tuple[str, float]]:
        """Classes with probabilities, the likeliest first, for a text about one or two images.

        Raises:
            EvaluationError: there are too few or too many images, no text, or the model was not
                trained for it.
        """
        task, said = self._task, _said(text)
        if not isinstance(task, PairClassification):
            raise self._wrong_task("judge texts", "entailment or statements")
        wanted = self.images_judged
        if len(images) != wanted:
            count = "1 image" if wanted == 1 else f"{wanted} images"
            raise EvaluationError(f"{task.kind} is about {count}, not {len(images)}")
        seen = [_seen(image) for image in images]
        return self._with(lambda: predict_one.labels_of(task, seen, said, self.device))

    def match(self, image: Image.Image | None, text: str) -> list[tuple[str, float]]:
        """How likely a text belongs to an image.

        Raises:
            EvaluationError: there is no image or no text.
        """
        seen, said = _seen(image), _said(text)
        return self._with(lambda: predict_one.matched_of(self.loaded, seen, said, self.device))

    def ground(self, image: Image.Image | None, phrase: str) -> tuple[Image.Image, Image.Image]:
        """The image, and again with the Grad-CAM map of a phrase over it, of the same size.

        Raises:
            EvaluationError: there is no image, or the phrase holds no word.
        """
        seen = _seen(image)
        heat = phrase_heat(self.loaded, seen, _said(phrase), device=self.device)
        return framed(seen, side=480), heat_over(seen, heat, side=480)

    def anchors(self, image: Image.Image | None, text: str) -> list[CaptionedImage]:
        """The image, and for each word the image with the share of groups that anchor a patch.

        Raises:
            EvaluationError: there is no image, or the text holds no word.
        """
        sample = CaptionedSample(_seen(image), [_said(text)], Annotation(), ("", ""))
        with evaluating(self.loaded.model, self.device) as place:
            found = map_caption(self.loaded, sample, place)
        if not found.words:
            raise EvaluationError(f"the text {text!r} holds no word")
        words = [
            CaptionedImage(anchors_over(found.image, word.heat, side=240), word.word)
            for word in found.words
        ]
        return [CaptionedImage(framed(found.image), f"S ≥ {found.threshold:.2f}"), *words]

    def _with(self, say: Callable[[], Answer]) -> Answer:
        with torch.no_grad(), evaluating(self._task or self.loaded.model, self.device):
            return say()

    def _wrong_task(self, what: str, kind: str) -> EvaluationError:
        own = f"was fine-tuned for {self.kind}" if self.kind else "was pretrained alone"
        return EvaluationError(f"{self.name} cannot {what}: it {own}; that needs {kind}")


def _said(text: str) -> str:
    if not (text or "").strip():
        raise EvaluationError("type a text first")
    return text.strip()


def _seen(image: Image.Image | None) -> Image.Image:
    if image is None:
        raise EvaluationError("choose an image first")
    seen = upright_rgb(image).copy()
    seen.thumbnail((MAX_SIDE, MAX_SIDE))
    return seen
