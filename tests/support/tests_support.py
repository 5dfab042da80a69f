"""Small models and vocabularies that several tests share."""

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize

from vlp.config import merge
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.models.config import AnchorOptions, ModelConfig

TINY_MODEL = {
    "text": {"vocab_size": 64, "width": 16, "layers": 1, "heads": 2, "intermediate": 32,
             "max_positions": 16, "max_tokens": 12},
    "image": {"image_size": 16, "patch_size": 4, "width": 16, "layers": 1, "heads": 2,
              "intermediate": 32},
    "cross": {"layers": 2, "heads": 2, "intermediate": 32, "anchor": {"groups": 2}},
    "embed_dim": 8,
}  # fmt: skip

POOLED_TOWER = {
    "architecture": {"name": "vit_small_patch14_reg4_dinov2", "embed_dim": 24, "depth": 2,
                     "num_heads": 2},
    "patch_size": 14, "image_size": 56, "pool": 2,
}  # fmt: skip

OBJECT_CLASSES = ("circle", "square", "triangle", "cross", "star")
DETECTION_MODEL = {
    "backbone": {"name": "test_resnet", "norm": "group", "stage": 2},
    "width": 32, "heads": 4, "intermediate": 64, "encoder_layers": 1, "decoder_layers": 2,
    "queries": 4,
}  # fmt: skip

CAPTIONS = [
    "a small red circle left of a blue square",
    "a large green triangle above a red star",
    "a blue cross at the top left",
]


def tiny_config(**parts):
    """The configuration of `TINY_MODEL` with changes by part, such as `cross={"layers": 1}`."""
    return ModelConfig.model_validate(merge(TINY_MODEL, parts))


def tiny_text(max_tokens=12):
    return TextProcessor(train_wordpiece(CAPTIONS, 64), max_tokens)


def unit(*shape, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(*shape, generator=random, dtype=dtype), dim=-1)


def ace(**settings):
    """Return keys of a cross-modal encoder: ACE-RPE's settings and options, by their names."""
    options = {
        name: value for name, value in settings.items() if name in AnchorOptions.model_fields
    }
    anchor = {name: value for name, value in settings.items() if name not in options}
    return {"anchor": anchor, **({"options": {"anchor": options}} if options else {})}


def train(task, data, steps, rate):
    """Take steps of AdamW on a task's batches; return their outputs."""
    optimiser = torch.optim.AdamW(task.parameters(), rate)
    outputs = []
    for step, (batch, _) in enumerate(data.batches(stop_after=steps)):
        outputs.append(task(batch, step))
        optimiser.zero_grad()
        outputs[-1].loss.backward()
        optimiser.step()
    return outputs


def saved_bytes(function):
    """Return how many bytes a call keeps for its backward pass."""
    total = 0

    def count(tensor):
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        function()
    return total


def first_batch(data):
    """Return the first batch of a task's data."""
    return next(iter(data.batches()))[0]


def dark_and_light(folder, images):
    """Write two class folders of that many images each."""
    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(images):
            pixels = rng.integers(level - 40, level + 40, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder
