"""Visual question answering as a class of transformers: a model folder fine-tuned for `vqa`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import AutoModelForVisualQuestionAnswering, PreTrainedModel

from vlp.data.downstream.vqa import VqaBatch
from vlp.models.folder import placed
from vlp.models.pretrained.local_copy import hub_options, local_folder
from vlp.tasks.downstream.task import load_task
from vlp.tasks.downstream.vqa import Vqa
from vlp.tasks.serving.config import VlpConfig
from vlp.tasks.serving.model import text_inputs
from vlp.tasks.serving.options import known_options, one_device, type_of
from vlp.tasks.serving.outputs import VlpAnswers


class ScoredAnswer(NamedTuple):
    """An answer and the likelihood of all its word pieces and of its end."""

    answer: str
    score: float


class VlpForQuestionAnswering(PreTrainedModel):
    """A model that ranks its list of answers to questions about images.

    Args:
        config: sizes; `id2label` is the list of answers.
        task: the task of the folder (in `task`), which is taken over.

    Raises:
        ValueError: there is no task; its list of answers is no part of a configuration.
    """

    config_class = VlpConfig
    base_model_prefix = "vlp"
    main_input_name = "pixel_values"

    def __init__(self, config: VlpConfig, task: Vqa | None = None) -> None:
        if task is None:
            raise ValueError("VlpForQuestionAnswering comes from a folder: use from_pretrained")
        super().__init__(config)
        self.task = task
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Leave the weights: they are those of the folder."""

    def forward(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        word_mask: Tensor | None = None,
        return_dict: bool | None = None,
        token_type_ids: Tensor | None = None,
    ) -> VlpAnswers | tuple[Tensor, ...]:
        """Score the listed answers of B questions; arguments, (B, ...), as `VlpModel` takes them.

        One image stands for all questions, and one question for all images.

        Raises:
            ValueError: there are several of both, and not as many of one as of the other.
        """
        most = self.task.model.config.text.max_tokens
        texts = text_inputs(input_ids, attention_mask, word_mask, most)
        none = input_ids.new_zeros(0)
        batch = VqaBatch(
            pixel_values,
            *texts,
            answer_ids=none.view(0, 0),
            owners=none,
            shares=pixel_values.new_zeros(0),
            valid=texts.attention_mask.any(1),
        )
        with torch.no_grad():
            found = self.task.ranking().likelihoods(self.task.remember(batch))
        logits = found - torch.log(-torch.expm1(found.clamp(max=-1e-7)))
        out = VlpAnswers(logits=logits)
        return out if return_dict is not False else out.to_tuple()

    def answer(self, top_k: int = 1, **inputs: Any) -> list[list[ScoredAnswer]]:
        """Return the `top_k` likeliest answers of each question, the best first.

        Args:
            top_k: answers of a question; all, where fewer are listed.
            inputs: as the processor makes them.
        """
        scores, numbers = self(**inputs).logits.sigmoid().topk(min(top_k, len(self.task.answers)))
        return [
            [ScoredAnswer(self.task.answers[n], s) for s, n in zip(*row)]
            for row in zip(scores.tolist(), numbers.tolist())
        ]

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        config: VlpConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        **options: Any,
    ) -> Self:
        """Read a folder that `vlp finetune vqa` wrote; arguments as of `VlpModel.from_pretrained`.

        Raises:
            FileNotFoundError: there is no such folder, or it was not fine-tuned.
            ValueError: it was fine-tuned for another task, or is damaged.
            ConfigError: a configuration in it does not fit.
            TypeError: an option is unknown.
        """
        folder = local_folder(os.fspath(pretrained_model_name_or_path), **hub_options(options))
        dtype = type_of(dtype, options)
        known_options(options)
        task = load_task(folder)
        if not isinstance(task, Vqa):
            raise ValueError(f"{folder} was fine-tuned for {task.kind}, not for vqa")
        answers = dict(enumerate(task.answers))
        own = VlpConfig.of(task.model.config, id2label=answers)
        own.name_or_path = str(pretrained_model_name_or_path)
        placed(task, one_device(device_map), dtype)
        return cls(own, task).eval()

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Write the whole folder, its tokenizer and preparation included, as fine-tuning does.

        Args:
            save_directory: made if missing.
            is_main_process: False writes nothing.
            state_dict: ignored; the model's own is written.
            push_to_hub: upload the files, too.
            options: of `push_to_hub`, such as `repo_id`.
        """
        if not is_main_process:
            return
        self.task.save_model(Path(save_directory), self.task.state_dict())
        if push_to_hub:
            self.push_to_hub(options.pop("repo_id", Path(save_directory).name), **options)


AutoModelForVisualQuestionAnswering.register(VlpConfig, VlpForQuestionAnswering, exist_ok=True)
