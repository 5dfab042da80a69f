"""`vlp convert-albef`: a model folder of a public ALBEF checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from vlp.config import load_config, save_config
from vlp.data.image.transforms import Preprocessing
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.config import ModelConfig
from vlp.models.folder import save_pretrained
from vlp.models.pretrained.albef import albef_config, load_albef
from vlp.models.pretrained.local_copy import CONFIG
from vlp.models.pretrained.published import read_pth
from vlp.models.vlp import VLPModel


def convert(
    checkpoint: Path,
    vocabulary: str,
    out: Path,
    image_size: int | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Write the model folder `out`; print how the weights of each part were loaded.

    vocabulary: folder or hub name of the tokenizer; image_size: None for the checkpoint's.
    """
    if (out / CONFIG).exists():
        raise FileExistsError(f"{out} already holds a model")
    state = read_pth(checkpoint)
    config = _with_overrides(albef_config(state, image_size), overrides)
    text = TextProcessor.load(vocabulary, config.text.max_tokens)
    if text.vocab_size != config.text.vocab_size:
        raise ValueError(
            f"{vocabulary} has {text.vocab_size} word pieces and {checkpoint} "
            f"{config.text.vocab_size}: it was trained with another vocabulary"
        )
    torch.manual_seed(0)  # for the parts that ALBEF does not have
    model = VLPModel(config)
    print(load_albef(model, state, checkpoint.name))
    preprocessing = Preprocessing(config.image.image_size, *config.image.statistics)
    save_pretrained(out, config, model.state_dict(), text, preprocessing)
    print(f"{out}: {sum(weight.numel() for weight in model.parameters()):,} parameters")


def _with_overrides(config: ModelConfig, overrides: Sequence[str]) -> ModelConfig:
    # `load_config` reads files alone.
    with tempfile.TemporaryDirectory(prefix="vlp-albef-") as folder:
        file = Path(folder) / "albef.yaml"
        save_config(config, file)
        return load_config(file, ModelConfig, overrides)
