"""Question answering: a decoder generates the answer or ranks given answers (ALBEF, section 4).

The decoder attends to the cross-modal encoder's text stream (ACE-RPE, section 4.2).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from vlp import distributed
from vlp.config import ConfigError
from vlp.data.shards.shard_reader import Items
from vlp.data.stream.loader import OrderedData
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.decoder import (
    CANDIDATES,
    AnswerDecoderConfig,
    AnswerRanking,
    Memory,
    answer_likelihood,
    answer_logits,
)
from vlp.models.folder import Loaded
from vlp.models.vlp import broadcast_pairs
from vlp.objectives.loss import Loss
from vlp.precision import require_finite
from vlp.tasks.downstream.registry import DownstreamTask, TaskCard, register_task
from vlp.tasks.downstream.task import SCORES, WritingTask
from vlp.tasks.task import Precision, StepOutput
from vlp.tasks.teacher import Distilled, DistilledConfig
from vlp.tasks.vqa.data import (
    VqaBatch,
    VqaDataConfig,
    VqaDataset,
    frequent_answers,
    questions_in,
    read_answers,
)
from vlp.tasks.vqa.metrics import Version

logger = logging.getLogger(__name__)

Predict = Literal["rank", "generate"]


class VqaConfig(DistilledConfig):
    """Decoder, data, prediction and scoring."""

    kind: Literal["vqa"] = Field("vqa", description="selects this class")
    data: VqaDataConfig = Field(description="shards of questions, and the answers to choose from")
    decoder: AnswerDecoderConfig = Field(
        AnswerDecoderConfig(), description="sizes and initial weights of the text decoder"
    )
    predict: Predict = Field(
        "rank", description="rank: choose from the answers; generate: write freely"
    )
    candidates: int | None = Field(
        CANDIDATES, ge=1, description="answers that `rank` scores in full; null: all that can win"
    )
    beams: int = Field(3, ge=1, description="number of beams of `generate`")
    accuracy: Version = Field("official", description="the evaluator; see vlp.tasks.vqa.metrics")


class Vqa(Distilled, WritingTask):
    """Negative log-likelihood of answers, weighted by the share of people who gave them."""

    metric: ClassVar[str] = "accuracy"
    frozen_parts = SCORES
    config: VqaConfig

    def __init__(
        self,
        config: VqaConfig,
        parts: Loaded,
        answers: Sequence[str],
        precision: Precision = "float32",
    ) -> None:
        super().__init__(config, parts, precision)
        self.add_decoder(config.decoder, parts, config.data.max_answer)
        self.answer_text = TextProcessor(self.text.tokenizer, config.data.max_answer)
        # Answers of equal tokens count as one answer, the first in the list.
        self._answer_of_ids: dict[tuple[int, ...], str] = {}
        for answer, ids in zip(answers, self.answer_text(list(answers)).text_ids.tolist()):
            self._answer_of_ids.setdefault(tuple(ids), answer)
        self.answers = tuple(self._answer_of_ids.values())

    def metadata(self) -> dict[str, Any]:
        """Return the list of answers."""
        return {"answers": list(self.answers)}

    @classmethod
    def restore(cls, config: VqaConfig, parts: Loaded, metadata: Mapping[str, Any]) -> Self:
        """Create the task of a model folder; the caller loads the decoder's weights."""
        return cls(config, parts, metadata["answers"])

    def dataset(self, folders: Sequence[str | Path], limit: int | None = None) -> VqaDataset:
        """Return the dataset of shard folders' first `limit` questions."""
        items = Items(folders, questions_in, limit)
        data = self.config.data
        return VqaDataset(items, self.text, self.prepare, data.max_answer, data.folder_weights)

    def remember(self, batch: VqaBatch) -> Memory:
        """Encode questions with their images as the decoder's memory of B rows."""
        text = self.model.encode_text(batch.text_ids, batch.attention_mask, batch.word_mask)
        image = self.model.encode_image(batch.pixels)
        # A single image is paired with all questions, or a single question with all images.
        pairs = broadcast_pairs(len(image.states), len(text.states), text.states.device)
        features = self.model.cross(image, text, pairs, need_image=False)
        return self.decoder.remember(features.text, features.attention_mask)

    def token_logits(self, batch: VqaBatch) -> Tensor:
        """Compute (R, vocabulary) logits of the R tokens of all answers, end tokens included."""
        memory = self.remember(batch).select(batch.question_index)
        embedding = self.model.text_encoder.embedding
        pad_id, positions = self.text.pad_id, batch.positions
        return answer_logits(self.decoder, memory, batch.answer_ids, embedding, pad_id, positions)

    def forward(self, batch: VqaBatch, step: int) -> StepOutput:
        """Compute the loss in nats per question, and the token accuracy."""
        device = batch.pixels.device
        with self.autocast(device):
            memory = self.remember(batch).select(batch.question_index)
            embedding = self.model.text_encoder.embedding
            target = self.soft_target(step, device, lambda task: task.token_logits(batch))
            soft, alpha = target or (None, 0.0)
            # With a teacher, `log_probability` is minus the cross-entropy with the mixed target.
            output = answer_likelihood(
                self.decoder,
                memory,
                batch.answer_ids,
                embedding,
                self.text.pad_id,
                soft_target=soft,
                alpha=alpha,
                positions=batch.positions,
            )
        is_valid = batch.valid[batch.question_index]
        nats = -(output.log_probability * batch.answer_weights).where(is_valid, 0)
        correct, tokens = (
            count.where(is_valid, 0).sum() for count in (output.correct, output.tokens)
        )
        return self.step_output(
            {"answers": Loss(nats.sum(), batch.valid.sum())},
            statistics={"token_accuracy": correct / tokens.clamp(min=1)},
        )

    @torch.no_grad()
    def predict(self, batch: VqaBatch, method: Predict | None = None) -> list[str]:
        """Answer each question; `method` replaces the configuration's `predict`."""
        return self.answer(self.remember(batch), method)

    @torch.no_grad()
    def answer(self, memory: Memory, method: Predict | None = None) -> list[str]:
        """Answer each memory row's question; `method` replaces the configuration's `predict`."""
        config = self.config
        if (method or config.predict) == "rank":
            ranked = self.ranking()(memory)
            require_finite(ranked.log_probability)
            return [self.answers[index] for index in ranked.best.tolist()]
        return [self._listed_spelling(text) for text in self.write_texts(memory, config.beams)]

    def ranking(self) -> AnswerRanking:
        """Return a ranking of `answers`, on the model's device."""
        embedding = self.model.text_encoder.embedding
        ids = torch.tensor(list(self._answer_of_ids), device=embedding.word.weight.device)
        return AnswerRanking(self.decoder, ids, embedding, self.text.pad_id, self.config.candidates)

    def _listed_spelling(self, text: str) -> str:
        """Return the listed answer with the same tokens ("10:30" for "10 : 30"), else the text."""
        ids = self.answer_text([text]).text_ids[0].tolist()
        return self._answer_of_ids.get(tuple(ids), text)


def build(
    config: VqaConfig, parts: Loaded, batch: int, seed: int, precision: Precision
) -> tuple[Vqa, OrderedData]:
    """Build the task and its training data."""
    data = config.data
    if unknown := sorted(data.folder_weights.keys() - set(data.train)):
        raise ConfigError(f"task.data.folder_weights: {unknown[0]} is no folder of `train`")
    answers = (
        frequent_answers(data.train, data.most_answers)
        if data.answers is None
        else read_answers(data.answers)
    )
    task = Vqa(config, parts, answers, precision)
    duplicates = len(answers) - len(task.answers)
    if duplicates and distributed.rank() == 0:
        example = next(answer for answer in answers if answer not in task.answers)
        logger.warning(
            f"{duplicates} of {len(answers)} answers have the word pieces of an earlier answer, "
            f"which replaces them, for example {example!r}: they are spelled in the same way, "
            f"truncated at task.data.max_answer {data.max_answer}, or unknown words"
        )
    task.init_decoder(parts)
    return task, task.dataset(data.train, data.limit).batches(data, batch, seed)


_CARD = TaskCard("visual question answering", "visual-question-answering")
register_task(DownstreamTask("vqa", VqaConfig, build, Vqa.restore, _CARD))
