"""Heat map of a phrase over an image, by Grad-CAM."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from evaluation.core.encode_one import encode_one
from evaluation.core.eval_mode import evaluating
from evaluation.core.samples import EvaluationError
from evaluation.grounding.gradcam import grad_cam, layer_number
from vlp.models.features import ImageFeatures
from vlp.models.folder import Loaded


def phrase_heat(
    loaded: Loaded,
    image: Image.Image | ImageFeatures,
    phrase: str,
    *,
    layer: int | None = None,
    device: torch.device | str | None = None,
) -> NDArray[np.float32]:
    """The map (rows, columns) of a phrase over the patches: at least 0, not scaled.

    Args:
        loaded: model, text and image preparation.
        image: any size, or its features, a batch of one.
        phrase: with a word in it.
        layer: of the cross-modal encoder, see `evaluation.grounding.gradcam.grad_cam`.
        device: where to compute; None is this rank's GPU, or the CPU.

    Raises:
        EvaluationError: the phrase holds no word, or there is no such layer.
    """
    try:
        number = layer_number(loaded.model, layer)
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    with evaluating(loaded.model, device) as torch_device:
        if isinstance(image, Image.Image):
            image = encode_one(loaded, image, torch_device)
        with torch.no_grad():
            tokens = (part.to(torch_device) for part in loaded.text([phrase]))
            text = loaded.model.encode_text(*tokens)
        if not text.word_mask.any():
            raise EvaluationError(f"the text {phrase!r} holds no word")
        maps = grad_cam(loaded.model, image, text, number)[0]
    # As in ALBEF the mean is over all tokens, [CLS] among them.
    heat: NDArray[np.float32] = maps[text.attention_mask[0]].mean(0).float().cpu().numpy()
    return heat
