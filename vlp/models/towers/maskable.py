"""Whether masked image modelling can mask patches of an image encoder."""

from __future__ import annotations

from vlp.models.config import ImageConfig


def require_maskable(image: ImageConfig) -> None:
    """Require that MIM can mask patches of the image encoder and learn from them.

    Raises:
        ValueError: patches are pooled, the encoder is frozen, or its patches cannot be replaced.
    """
    if image.pool > 1:
        raise ValueError(
            f"objectives.mim predicts single patches; image.pool {image.pool} mixes them"
        )
    if image.trainable == 0:
        raise ValueError("objectives.mim trains the image encoder, which image.trainable 0 freezes")
    if image.architecture:
        from vlp.models.towers.image import require_editable

        require_editable(image)
