"""The image tower, the text tower and the ITM head as torch.export programs or ONNX files.

The first axis of every input and output is a batch of any size; texts have the folder's
`max_tokens`, images its size.

| file | inputs | outputs |
|---|---|---|
| `image` | pixel_values | image_embeds, image_states, image_tokens |
| `text` | input_ids, attention_mask | text_embeds, text_states, text_tokens |
| `match` | states and tokens of both, attention_mask, word_mask | log_odds |
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vlp.config import ConfigError
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel

Form = Literal["onnx", "torch"]

SUFFIXES: dict[Form, str] = {"onnx": ".onnx", "torch": ".pt2"}
_ONNX_PACKAGES = ("onnx", "onnxscript")
# Weights of more bytes go into FILE.data, as an ONNX file may not exceed 2 GiB.
_MAX_BYTES = 3 * 2**29


class ExportPart(NamedTuple):
    """Part of a model to export: name of its file, module, example inputs, and output names."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]


class _ModelPart(nn.Module):
    def __init__(self, model: VLPModel) -> None:
        super().__init__()
        self.model = model


class ExportImage(_ModelPart):
    """Image tower of a model."""

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode (B, 3, height, width) to (B, d), (B, 1 + M, width) and (B, M, d)."""
        image = self.model.encode_image(pixel_values)
        return image.feature, image.states, image.tokens


class ExportText(_ModelPart):
    """Text tower of a model."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode ids and mask (B, N) int64 to (B, d), (B, N, width) and (B, N, d)."""
        mask = attention_mask.bool()
        # The second mask is the word mask, which encoding does not read.
        text = self.model.encode_text(input_ids, mask, mask)
        return text.feature, text.states, text.tokens


class ExportMatch(_ModelPart):
    """Cross-modal encoder and ITM head of a model."""

    def forward(
        self,
        image_states: Tensor,
        image_tokens: Tensor,
        text_states: Tensor,
        text_tokens: Tensor,
        attention_mask: Tensor,
        word_mask: Tensor,
    ) -> Tensor:
        """Compute log-odds (B,) of B pairs, from outputs of both towers and of the processor."""
        # `cross` reads no feature: [CLS] stands in.
        image = ImageFeatures(image_states, image_states[:, 0], image_tokens)
        text = TextFeatures(
            text_states, text_states[:, 0], text_tokens, attention_mask.bool(), word_mask
        )
        logits = self.model.itm_logits(self.model.cross(image, text, need_image=False))
        return logits[:, 1] - logits[:, 0]


@torch.no_grad()
def export_parts(loaded: Loaded) -> list[ExportPart]:
    """Return the image, text and match part of a model on the CPU, with example inputs."""
    model, size = loaded.model.eval(), loaded.model.config.image.image_size
    # Groups of similar length depend on the data, and change no output.
    model.text_encoder.length_groups = 1
    # Several rows, as `torch.export` would specialise on a batch of 1.
    pixels = torch.rand(3, 3, size, size) * 2 - 1
    ids, attention, word_mask = loaded.text(["a", "a b c d e", ""])
    image, text = ExportImage(model), ExportText(model)
    _, image_states, image_tokens = image(pixels)
    _, text_states, text_tokens = text(ids, attention)
    image_outputs = "image_embeds", "image_states", "image_tokens"
    text_outputs = "text_embeds", "text_states", "text_tokens"
    match_inputs = {
        "image_states": image_states,
        "image_tokens": image_tokens,
        "text_states": text_states,
        "text_tokens": text_tokens,
        "attention_mask": attention.long(),
        "word_mask": word_mask,
    }
    text_inputs = {"input_ids": ids, "attention_mask": attention.long()}
    return [
        ExportPart("image", image, {"pixel_values": pixels}, image_outputs),
        ExportPart("text", text, text_inputs, text_outputs),
        ExportPart("match", ExportMatch(model), match_inputs, ("log_odds",)),
    ]


@torch.no_grad()
def exported_program(part: ExportPart) -> ExportedProgram:
    """Trace a part with `torch.export`, for batches of any size."""
    batch = Dim("batch", min=1)
    return torch.export.export(
        part.module, (), part.inputs, dynamic_shapes={name: {0: batch} for name in part.inputs}
    )


def export_model(loaded: Loaded, out: Path, form: Form = "onnx") -> list[Path]:
    """Write the parts of a model, its tokenizer and preprocessing; return the parts' files.

    form: "onnx", with the opset of the installed torch, or "torch", for `torch.export.load`.
    """
    if form == "onnx":
        for package in _ONNX_PACKAGES:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"ONNX needs the package {package}: pip install 'vlp[export]', or give "
                    "--format torch"
                )
    out.mkdir(parents=True, exist_ok=True)
    file_names = []
    # An ONNX file holds the name of its weights file, so files get their final names at once, in a
    # temporary folder.
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out) as temporary_folder:
        folder = Path(temporary_folder)
        with _quiet():
            for part in export_parts(loaded):
                program, file = exported_program(part), folder / f"{part.name}{SUFFIXES[form]}"
                if form == "torch":
                    _write_program(program, file)
                else:
                    write_onnx(program, part, file)
                file_names.append(file.name)
        loaded.text.save(folder)
        loaded.preprocess.save(folder)
        for file in folder.iterdir():
            file.replace(out / file.name)
    return [out / name for name in file_names]


def _write_program(program: ExportedProgram, file: Path) -> None:
    content = BytesIO()
    # PyTorch's own error, when it writes to a full disk, does not name the reason.
    torch.export.save(program, content)
    file.write_bytes(content.getbuffer())


def write_onnx(program: ExportedProgram, part: ExportPart, file: Path) -> None:
    """Write a program as an ONNX file; weights of more than 1.5 GiB go into a second file."""
    onnx_program = torch.onnx.export(
        program,
        input_names=list(part.inputs),
        output_names=list(part.outputs),
        dynamo=True,
        verbose=False,
    )
    assert onnx_program is not None
    large = sum(tensor.nbytes for tensor in program.state_dict.values()) > _MAX_BYTES
    onnx_program.save(str(file), external_data=large)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings about its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
