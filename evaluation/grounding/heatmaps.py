"""Images with heat maps over their patches, and with boxes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from typing import Literal

import numpy as np
import torch
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from evaluation.encoder import require_finite
from evaluation.grounding.grad_cam import grad_cam
from evaluation.samples import EvaluationError
from vlp.models.cross_encoder import ImageFeatures
from vlp.models.folder import Loaded

SHARE_COLOURS, GRADCAM_COLOURS, PATH_COLOURS = "inferno", "turbo", "viridis_r"
BOX_COLOUR = "#19d419"

# A box [x, y, width, height] in pixels of the image, and a colour.
DrawnBox = tuple[Sequence[float], str]


def overlay_anchors(
    image: Image.Image, share: NDArray[np.floating], boxes: Sequence[DrawnBox] = (), side: int = 128
) -> Image.Image:
    """Draw shares (rows, columns) of channel groups over an image; patches of 0 are transparent."""
    return overlay(image, share, SHARE_COLOURS, np.where(share > 0, 0.75, 0.0), boxes, side)


def overlay_heatmap(
    image: Image.Image,
    heat: NDArray[np.floating],
    boxes: Sequence[DrawnBox] = (),
    side: int = 240,
    max_heat: float | None = None,
) -> Image.Image:
    """Draw a heat map (rows, columns) over an image; weak patches are more transparent.

    max_heat: value of the strongest colour; None: the map's maximum.
    """
    max_heat = float(heat.max()) if max_heat is None else max_heat
    scaled = heat / max_heat if max_heat > 0 else heat
    # The square root keeps weak patches visible.
    return overlay(image, scaled, GRADCAM_COLOURS, np.sqrt(scaled) * 0.75, boxes, side)


def draw_boxes(image: Image.Image, boxes: Sequence[DrawnBox] = (), side: int = 240) -> Image.Image:
    """Draw boxes on the image, its longer side `side` pixels."""
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    # Enlarged without blur, so that the edges of patches stay sharp.
    resampling = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    canvas = image.convert("RGB").resize(size, resampling)
    pen = ImageDraw.Draw(canvas)
    for (x, y, width, height), colour in boxes:
        corners = [x * scale, y * scale, (x + width) * scale - 1, (y + height) * scale - 1]
        # Pillow refuses boxes of less than a pixel.
        if corners[2] > corners[0] and corners[3] > corners[1]:
            pen.rectangle(corners, outline=colour, width=max(2, side // 80))
    return canvas


def data_uri(image: Image.Image, kind: Literal["JPEG", "PNG"] | None = None) -> str:
    """Return a `data:` URI of the image; None: in the shorter format."""
    if kind is None:
        return min((data_uri(image, "PNG"), data_uri(image, "JPEG")), key=len)
    file = BytesIO()
    image.save(file, kind, **({"quality": 85} if kind == "JPEG" else {"optimize": True}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def overlay(
    image: Image.Image,
    values: NDArray[np.floating],
    colours: str,
    alpha: NDArray[np.floating],
    boxes: Sequence[DrawnBox],
    side: int,
) -> Image.Image:
    """Draw values and opacities (rows, columns) from 0 to 1 over a pale grey image, and boxes."""
    pale = image.convert("L").point(lambda grey: 128 + grey // 2).convert("RGB")
    canvas = draw_boxes(pale, (), side).convert("RGBA")
    rgba = colormaps[colours](np.clip(values, 0, 1))
    rgba[..., 3] = np.clip(alpha, 0, 1)
    layer = Image.fromarray((rgba * 255).astype(np.uint8))
    # Preprocessing resizes the image to a square, so its patches tile it evenly.
    canvas.alpha_composite(layer.resize(canvas.size, Image.Resampling.NEAREST))
    scale = side / max(image.size)
    canvas_boxes = [([part * scale for part in box], colour) for box, colour in boxes]
    return draw_boxes(canvas, canvas_boxes, max(canvas.size))


def phrase_heat(loaded: Loaded, image: ImageFeatures, phrase: str) -> NDArray[np.float32]:
    """Return the Grad-CAM map (rows, columns) of a phrase; `image` is a batch of one."""
    with torch.no_grad():
        tokens = (part.to(image.states.device) for part in loaded.text([phrase]))
        text = loaded.model.encode_text(*tokens)
    if not text.word_mask.any():
        raise EvaluationError(f"the text {phrase!r} holds no word")
    try:
        maps = grad_cam(loaded.model, image, text)[0]
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    # The mean over all tokens including [CLS], as in ALBEF.
    return require_finite(maps[text.attention_mask[0]].mean(0).float().cpu().numpy())
