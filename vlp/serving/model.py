"""The VLP model as a class of transformers, with the calls of CLIP and of open_clip."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForVisualQuestionAnswering,
    AutoModelForZeroShotImageClassification,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from vlp.data.text.tokenizer import TextTokens
from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.folder import CONFIG, read_config, read_model, save_model, to_device
from vlp.models.pretrained.load import check_folder, join_names
from vlp.models.pretrained.local_copy import hub_options, local_folder
from vlp.models.text_encoder import require_ids
from vlp.models.vlp import VLPModel, broadcast_pairs
from vlp.serving.config import VlpConfig, require_options, single_device
from vlp.tasks.downstream.task import load_task
from vlp.tasks.vqa.data import VqaBatch
from vlp.tasks.vqa.task import Vqa


@dataclass
class VlpOutput(ModelOutput):
    """Requested outputs for I images and T texts; others are None.

    Attributes:
        loss: contrastive cross-entropy, the mean of both directions, with `return_loss=True`.
        logits_per_image: (I, T) cosines over the learned temperature; softmax over texts.
        logits_per_text: (T, I), their transpose; softmax over images.
        text_embeds: (T, d) of unit length.
        image_embeds: (I, d) of unit length.
        itm_logits: (B, 2), not matched and matched, of the B pairs, with `match=True`.
        similarity: (B, M, N, G) cosines of patches and tokens by channel group (Eq. 3), with
            `output_anchors=True` and a model with ACE-RPE; the same holds for the fields below.
        anchors: (B, M, N, G) bool, True where a patch is an anchor of a word.
        path: (B, M, N, G) anchor paths (Eq. 7), 0 where no anchor is in reach.
    """

    loss: Tensor | None = None
    logits_per_image: Tensor | None = None
    logits_per_text: Tensor | None = None
    text_embeds: Tensor | None = None
    image_embeds: Tensor | None = None
    itm_logits: Tensor | None = None
    similarity: Tensor | None = None
    anchors: Tensor | None = None
    path: Tensor | None = None


@dataclass
class VlpAnswers(ModelOutput):
    """Scores of the answers in `id2label`: `logits` (B, answers), whose sigmoid is a likelihood."""

    logits: Tensor | None = None


_PREFIX = "model."
logger = logging.getLogger(__name__)


class _VlpPreTrainedModel(PreTrainedModel):
    """Base of both classes, which saves folders as training does."""

    config_class = VlpConfig
    base_model_prefix = "vlp"
    main_input_name = "pixel_values"

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Leave the weights as `VLPModel` initialises them or as they were read."""

    @classmethod
    def _read(
        cls, folder: Path, config: VlpConfig | None, options: dict[str, Any], weights: bool
    ) -> Self:
        """Read a folder; `weights` False reads none, as others are loaded next."""
        raise NotImplementedError

    def _write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        config: VlpConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        state_dict: Mapping[str, Tensor] | None = None,
        output_loading_info: bool = False,
        **options: Any,
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Read a model folder, written by training or `save_pretrained`, local or from the hub.

        A question-answering model takes folders of `vlp finetune vqa`, and no configuration.

        Args:
            config: configuration in place of the folder's.
            dtype: such as "bfloat16" (`torch_dtype` is its old name); None and "auto": float32.
            device_map: device of the whole model, such as "cuda"; "auto": a GPU if available.
            state_dict: weights in place of the folder's; weights that it lacks keep their
                initialisation, with a warning.
            output_loading_info: also return the names of missing and unexpected weights.
            options: of the hub (`revision`, `token`, `cache_dir`, `local_files_only`,
                `force_download`), or keys of the configuration, merged into their sections.
        """
        folder = local_folder(os.fspath(pretrained_model_name_or_path), **hub_options(options))
        # Pipelines still pass the option's old name.
        torch_dtype = options.pop("torch_dtype", None)
        dtype = torch_dtype if dtype is None else dtype
        instance = cls._read(folder, config, options, weights=state_dict is None).eval()
        instance.name_or_path = instance.config.name_or_path = str(pretrained_model_name_or_path)
        report = load_state(instance, state_dict)
        to_device(instance, single_device(device_map), None if dtype == "auto" else dtype)
        return (instance, report) if output_loading_info else instance

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Write a model folder as training does, without the processor's files.

        state_dict: weights in place of the model's. push_to_hub: upload the folder, with `options`.
        """
        if not is_main_process:
            return
        self._write(Path(save_directory), self.state_dict() if state_dict is None else state_dict)
        if push_to_hub:
            self.push_to_hub(options.pop("repo_id", Path(save_directory).name), **options)


class VlpModel(_VlpPreTrainedModel):
    """A `VLPModel` (in `model`) with named inputs and outputs.

    `from_pretrained` reads folders of training, and `vlp.load` reads folders of `save_pretrained`.
    """

    def __init__(self, config: VlpConfig, model: VLPModel | None = None) -> None:
        super().__init__(config)
        self.model = VLPModel(config.model_config) if model is None else model
        # accelerate looks buffers up by their names in the weights file.
        self._buffers = self.model._buffers
        self._non_persistent_buffers_set = set(self._buffers)
        self.register_load_state_dict_pre_hook(_add_prefix)
        self.register_state_dict_post_hook(_remove_prefix)
        self.post_init()

    def __getattr__(self, name: str) -> Any:
        """Return a module of `model` by its name in the weights file, as accelerate looks it up."""
        inner = self.__dict__.get("_modules", {}).get("model")
        if inner is not None and name in inner._modules:
            return inner._modules[name]
        return super().__getattr__(name)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        word_mask: Tensor | None = None,
        match: bool = False,
        output_anchors: bool = False,
        return_loss: bool = False,
        return_dict: bool | None = None,
        token_type_ids: Tensor | None = None,
    ) -> VlpOutput | tuple[Tensor, ...]:
        """Encode images, texts or both, and compare every image with every text.

        Args:
            pixel_values: (I, 3, height, width), from the processor.
            input_ids: (T, N) int64; padding may be at either side.
            attention_mask: (T, N), 1 = not padding; None: no padding.
            word_mask: (T, N) bool, from the processor, for anchors and matching; None: all tokens
                but each text's first and last.
            match: return `itm_logits` of pairs: row by row, or one image or one text with all.
            output_anchors: return similarities, anchors and paths of the same pairs.
            return_loss: return the contrastive loss; image i and text i match.
            return_dict: False returns a tuple.
            token_type_ids: ignored; tokenizers may pass it.
        """
        outputs: dict[str, Tensor] = {}
        image = text = None
        if pixel_values is not None:
            image = self.model.encode_image(pixel_values)
            outputs["image_embeds"] = image.feature
        if input_ids is not None:
            text = self.text_features(input_ids, attention_mask, word_mask)
            outputs["text_embeds"] = text.feature
        if image is not None and text is not None:
            logits = image.feature @ text.feature.T / self.model.temperature()
            outputs |= {"logits_per_image": logits, "logits_per_text": logits.T}
            if return_loss:
                outputs["loss"] = _contrastive_loss(logits)
            if match or output_anchors:
                outputs |= self._pair_outputs(image, text, match, output_anchors)
        elif not outputs or match or output_anchors or return_loss:
            raise ValueError("give pixel_values and input_ids, as the processor returns them")
        out = VlpOutput(**outputs)
        use_dict = return_dict if return_dict is not None else self.config.return_dict
        return out if use_dict is not False else out.to_tuple()

    def encode_image(self, pixels: Tensor, normalize: bool = False) -> Tensor:
        """Embed images (B, 3, height, width) -> (B, d), with the arguments of open_clip."""
        feature = self.model.image_encoder.project(self.model.image_encoder(pixels))
        return functional.normalize(feature, dim=-1) if normalize else feature

    def encode_text(
        self, tokens: TextTokens | Mapping[str, Tensor] | Tensor, normalize: bool = False
    ) -> Tensor:
        """Embed texts -> (B, d), with the arguments of open_clip.

        tokens: output of the processor or of `vlp.load`'s tokenizer, or ids (B, N) in which 0 is
        padding, as in BERT's vocabularies.
        """
        if isinstance(tokens, Mapping):
            ids, mask = tokens["input_ids"], tokens["attention_mask"]
        elif isinstance(tokens, TextTokens):
            ids, mask, _ = tokens
        else:
            ids = require_ids(tokens)
            if self.model.text_encoder.pad_id:
                raise ValueError(
                    "token ids alone do not show the padding of this text tower; give the output "
                    "of the processor or tokenizer"
                )
            mask = ids != 0
        ids, mask, _ = self._text_inputs(ids, mask)
        feature = self.model.project_text(self.model.text_encoder(ids, mask), mask)
        return functional.normalize(feature, dim=-1) if normalize else feature

    def get_image_features(
        self, pixel_values: Tensor, **options: Any
    ) -> BaseModelOutputWithPooling:
        """Embed images (B, 3, height, width) as `pooler_output` (B, d), as CLIPModel does."""
        encoder = self.model.image_encoder
        states = encoder(pixel_values)
        return BaseModelOutputWithPooling(
            encoder.drop_summary_tokens(states), encoder.project(states)
        )

    def get_text_features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> BaseModelOutputWithPooling:
        """Embed texts, ids and mask (B, N), as `pooler_output` (B, d), as CLIPModel does."""
        input_ids, mask, _ = self._text_inputs(input_ids, attention_mask)
        states = self.model.text_encoder(input_ids, mask)
        return BaseModelOutputWithPooling(states, self.model.project_text(states, mask))

    def match(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        word_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute log-odds (B,) that texts describe images, by the cross-modal encoder.

        Arguments as in `forward`; images and texts have B rows or one.
        """
        text = self.text_features(input_ids, attention_mask, word_mask)
        return self.model.match(self.model.encode_image(pixel_values), text)

    def text_features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        word_mask: Tensor | None = None,
    ) -> TextFeatures:
        """Encode texts (B, N) for calls of `self.model`; arguments as in `forward`."""
        return self.model.encode_text(*self._text_inputs(input_ids, attention_mask, word_mask))

    def _text_inputs(
        self, input_ids: Tensor, attention_mask: Tensor | None, word_mask: Tensor | None = None
    ) -> TextTokens:
        max_tokens = self.model.config.text.max_tokens
        return text_inputs(input_ids, attention_mask, word_mask, max_tokens)

    def _pair_outputs(
        self, image: ImageFeatures, text: TextFeatures, match: bool, output_anchors: bool
    ) -> dict[str, Tensor]:
        pairs = broadcast_pairs(len(image.states), len(text.states), text.states.device)
        features = self.model.cross(image, text, pairs, need_image=False)
        outputs = {}
        if match:
            self.model.warn_if_match_is_untrained()
            outputs["itm_logits"] = self.model.itm_logits(features).float()
        paths = features.paths
        if output_anchors and paths is not None:
            word_mask = text.word_mask if pairs is None else text.word_mask[pairs.texts]
            is_anchor = paths.similarity >= self.model.path_settings.threshold
            outputs["similarity"] = paths.similarity
            outputs["anchors"] = is_anchor & word_mask[:, None, :, None]
            outputs["path"] = paths.image_path[:, 1:]
        return outputs

    @classmethod
    def _read(
        cls, folder: Path, config: VlpConfig | None, options: dict[str, Any], weights: bool
    ) -> Self:
        changes = require_options(options, ModelConfig.model_fields)
        has_changes = config is not None or len(changes) > 0
        if config is None:
            config = VlpConfig.from_pretrained(folder, **changes)
        elif changes:
            config = VlpConfig.from_dict(config.to_dict(), **changes)
        model = None
        if weights:
            if has_changes and (folder / CONFIG).is_file():
                check_folder(config.model_config, read_config(folder / CONFIG), str(folder))
            model = read_model(folder, config.model_config)
        return cls(config, model)

    def _write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        weights = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}
        save_model(folder, self.model.config, weights)


def text_inputs(
    input_ids: Tensor, attention_mask: Tensor | None, word_mask: Tensor | None, max_tokens: int
) -> TextTokens:
    """Return ids and both masks, (B, N) each, in the form of a folder's tokenizer.

    Padding moves to the end. Texts are truncated to `max_tokens`, but keep their last token, [SEP].
    word_mask None: all tokens but the first and the last of each text.
    """
    ones = torch.ones_like(require_ids(input_ids), dtype=torch.bool)
    mask = ones if attention_mask is None else attention_mask.bool()
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    input_ids, mask = input_ids.gather(1, order), mask.gather(1, order)
    word_mask = _inner_tokens(mask) if word_mask is None else word_mask.bool().gather(1, order)
    tokens = TextTokens(input_ids, mask, word_mask)
    if input_ids.shape[1] <= max_tokens:
        return tokens
    positions = torch.arange(max_tokens, device=input_ids.device).repeat(len(input_ids), 1)
    # The last token that is not padding goes to the last position.
    positions[:, -1] = (mask.sum(1) - 1).clamp(min=max_tokens - 1)
    return TextTokens(*(field.gather(1, positions) for field in tokens))


def _inner_tokens(mask: Tensor) -> Tensor:
    """Drop the first and the last token of each row of a mask (B, N) with padding at the end."""
    inner = mask & mask.roll(-1, 1)
    inner[:, 0] = inner[:, -1] = False
    return inner


def _add_prefix(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename weights from a file to the names in `VlpModel`, before they are loaded."""
    # transformers' Trainer reads the weights file by itself.
    for name in [name for name in state if name.startswith(prefix)]:
        file_name = name.removeprefix(prefix)
        if not file_name.startswith(_PREFIX):
            state[f"{prefix}{_PREFIX}{file_name}"] = state.pop(name)


def _remove_prefix(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename weights of `VlpModel` to the names in a file, which accelerate compares."""
    for name in [name for name in state if name.startswith(f"{prefix}{_PREFIX}")]:
        state[f"{prefix}{name.removeprefix(f'{prefix}{_PREFIX}')}"] = state.pop(name)


def load_state(model: PreTrainedModel, state: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Load weights, if any, and return transformers' `output_loading_info`."""
    missing: list[str] = []
    unexpected: list[str] = []
    if state is not None:
        result = model.load_state_dict(state, strict=False)
        missing = [name.removeprefix(_PREFIX) for name in result.missing_keys]
        unexpected = [name.removeprefix(_PREFIX) for name in result.unexpected_keys]
    if missing:
        logger.warning("state_dict lacks these weights: %s", join_names(missing))
    if unexpected:
        logger.warning("the model lacks these weights: %s", join_names(unexpected))
    keys = {"missing_keys": set(missing), "unexpected_keys": set(unexpected)}
    return {**keys, "mismatched_keys": set(), "error_msgs": []}


def _contrastive_loss(logits: Tensor) -> Tensor:
    """Compute the symmetric contrastive loss of logits (B, B) with matches on the diagonal."""
    rows, columns = logits.shape
    if rows != columns:
        raise ValueError(f"the loss needs as many images as texts, not {rows} and {columns}")
    target = torch.arange(rows, device=logits.device)
    i2t, t2i = functional.cross_entropy(logits, target), functional.cross_entropy(logits.T, target)
    return (i2t + t2i) / 2


AutoModel.register(VlpConfig, VlpModel, exist_ok=True)
AutoModelForZeroShotImageClassification.register(VlpConfig, VlpModel, exist_ok=True)


class ScoredAnswer(NamedTuple):
    """An answer, and the likelihood of its word pieces and end (`score`)."""

    answer: str
    score: float


class VlpForQuestionAnswering(_VlpPreTrainedModel):
    """A model that ranks the answers in its configuration's `id2label` to image questions."""

    def __init__(self, config: VlpConfig, task: Vqa | None = None) -> None:
        if task is None:
            raise ValueError("create a VlpForQuestionAnswering with from_pretrained")
        super().__init__(config)
        self.task = task
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        word_mask: Tensor | None = None,
        return_dict: bool | None = None,
        token_type_ids: Tensor | None = None,
    ) -> VlpAnswers | tuple[Tensor, ...]:
        """Score the answers in `id2label` to B questions; arguments as in `VlpModel`."""
        max_tokens = self.task.model.config.text.max_tokens
        texts = text_inputs(input_ids, attention_mask, word_mask, max_tokens)
        empty = input_ids.new_zeros(0)
        batch = VqaBatch(
            pixel_values,
            *texts,
            answer_ids=empty.view(0, 0),
            question_index=empty,
            answer_weights=pixel_values.new_zeros(0),
            valid=texts.attention_mask.any(1),
        )
        with torch.no_grad():
            log_likelihoods = self.task.ranking().likelihoods(self.task.remember(batch))
        # log(p / (1 - p)), with p at most 1 - 1e-7.
        logits = log_likelihoods - torch.log(-torch.expm1(log_likelihoods.clamp(max=-1e-7)))
        out = VlpAnswers(logits=logits)
        return out if return_dict is not False else out.to_tuple()

    def answer(self, top_k: int = 1, **inputs: Any) -> list[list[ScoredAnswer]]:
        """Return the `top_k` likeliest answers of each question, the best first."""
        answers = self.task.answers
        scores, indices = self(**inputs).logits.sigmoid().topk(min(top_k, len(answers)))
        return [
            [ScoredAnswer(answers[index], score) for score, index in zip(*row)]
            for row in zip(scores.tolist(), indices.tolist())
        ]

    @classmethod
    def _read(
        cls, folder: Path, config: VlpConfig | None, options: dict[str, Any], weights: bool
    ) -> Self:
        """Read a folder of `vlp finetune vqa`; `config` and `weights` are ignored."""
        require_options(options)
        task = load_task(folder)
        if not isinstance(task, Vqa):
            raise ValueError(f"{folder} was fine-tuned for {task.kind}, not for vqa")
        answers = dict(enumerate(task.answers))
        sizes = task.model.config.model_dump(mode="json")
        return cls(VlpConfig(**sizes, id2label=answers), task)

    def _write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        weights = {name.removeprefix("task."): tensor for name, tensor in state.items()}
        self.task.save_model(folder, weights)


AutoModelForVisualQuestionAnswering.register(VlpConfig, VlpForQuestionAnswering, exist_ok=True)
