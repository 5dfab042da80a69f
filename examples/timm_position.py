"""Add a position encoding to a timm model and check that its output is unchanged at first.

python examples/timm_position.py
python examples/timm_position.py --encoding rope-mixed --pretrained
"""

from __future__ import annotations

import argparse

import timm
import torch

from vlp.positions import CROSS_MODAL, attach, list_positions
from vlp.positions.zero_start import zero_start


def main(arguments: list[str] | None = None) -> float:
    """Attach the encoding; returns the largest change of the model's output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    encodings = [name for name in list_positions() if name not in CROSS_MODAL]
    parser.add_argument("--encoding", default="irpe-product", choices=encodings)
    parser.add_argument("--on", help="letters of 'qkv', for encodings with the choice")
    parser.add_argument("--pretrained", action="store_true")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = timm.create_model(options.model, pretrained=options.pretrained).eval()
    images = torch.randn(1, *model.default_cfg["input_size"])
    with torch.no_grad():
        before = model(images)
        weights = sum(parameter.numel() for parameter in model.parameters())
        attach(model, options.encoding, on=options.on)
        zero_start(model)
        change = float((model(images) - before).abs().max())
    added = sum(parameter.numel() for parameter in model.parameters()) - weights
    print(f"{options.model} + {options.encoding}: {added:,} parameters added to {weights:,}")
    print(f"largest change of the output: {change:.2e}")
    return change


if __name__ == "__main__":
    main()
