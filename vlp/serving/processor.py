"""Preparation of images and texts as a processor of transformers, from a model folder's files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin

from vlp.data.text.tokenizer import TextProcessor
from vlp.models.pretrained.local_copy import hub_options, local_folder
from vlp.serving.config import PROCESSOR_OPTIONS, VlpConfig, require_options
from vlp.serving.image_processor import VlpImageProcessor


class VlpProcessor(ProcessorMixin):
    """Image processor and tokenizer of a model folder."""

    attributes = ("image_processor", "tokenizer")
    image_processor_class = "VlpImageProcessor"
    tokenizer_class = "AutoTokenizer"
    model_input_names = ["pixel_values", "input_ids", "attention_mask", "word_mask"]  # noqa: RUF012

    def __init__(self, image_processor: VlpImageProcessor, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer)
        self._text: TextProcessor | None = None

    @property
    def text(self) -> TextProcessor:
        """Return the same tokenizer as `vlp.load` does."""
        max_tokens = self.tokenizer.model_max_length
        if self._text is None or self._text.max_tokens != max_tokens:
            self._text = TextProcessor(self.tokenizer.backend_tokenizer, max_tokens)
        return self._text

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        return_tensors: str | None = None,
        **options: Any,
    ) -> BatchFeature:
        """Prepare images, texts or both for `VlpModel`.

        `options` such as `padding` are ignored, so that texts are padded as in training.

        Returns:
            pixel_values (I, 3, height, width); input_ids, attention_mask and word_mask (T, N), the
            last True for word pieces that are no special token.
        """
        if images is None and text is None:
            raise ValueError("there is nothing to prepare: give images, text or both")
        data: dict[str, Any] = {}
        if images is not None:
            data |= self.image_processor(images)
        if text is not None:
            if not isinstance(text, str) and isinstance(text, Sequence) and not text:
                raise ValueError("text is empty; give a string or a list of strings")
            ids, mask, word_mask = self.text(text)
            data |= {"input_ids": ids, "attention_mask": mask.long(), "word_mask": word_mask}
        return BatchFeature(data, tensor_type=return_tensors or "pt")

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any
    ) -> Self:
        """Read the preprocessing and tokenizer of a model folder, local or from the hub."""
        hub = hub_options(options)
        require_options(options, PROCESSOR_OPTIONS)
        folder = local_folder(os.fspath(pretrained_model_name_or_path), **hub)
        # AutoTokenizer would rebuild a tokenizer from the class in its configuration, not from
        # `tokenizer.json`.
        has_tokenizer = Path(folder, "tokenizer.json").is_file()
        tokenizer_class = PreTrainedTokenizerFast if has_tokenizer else AutoTokenizer
        tokenizer = tokenizer_class.from_pretrained(folder)
        return cls(VlpImageProcessor.from_pretrained(folder), tokenizer)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **options: Any
    ) -> None:
        """Write the preprocessing and tokenizer files; with `push_to_hub` upload them, too."""
        self.image_processor.preprocessing.save(Path(save_directory))
        self.text.save(Path(save_directory))
        if push_to_hub:
            self.push_to_hub(options.pop("repo_id", Path(save_directory).name), **options)


AutoProcessor.register(VlpConfig, VlpProcessor, exist_ok=True)
