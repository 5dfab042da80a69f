"""Find the anchor patches of each token of a text in an image.

    python examples/anchors.py --model runs/demo/run/model --image photo.jpg --text "a red circle"

Without --model, a tiny model with random weights shows the shapes; its anchors mean nothing.
"""

from __future__ import annotations

import argparse

import torch
from PIL import Image

import vlp
from vlp.data.image.transforms import Preprocessing
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.models.config import ModelConfig
from vlp.models.vlp import VLPModel
from vlp.positions.anchor import anchor_distance, anchor_path, group_similarity

TINY = {
    "text": {"vocab_size": 64, "width": 32, "layers": 1, "heads": 2, "intermediate": 64},
    "image": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 1, "heads": 2},
    "cross": {"layers": 1, "heads": 2, "intermediate": 64, "anchor": {"groups": 4}},
    "embed_dim": 16,
}


def main(arguments: list[str] | None = None) -> torch.Tensor:
    """Print the nearest patches of each token; returns the paths (1, patches, tokens, groups)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model folder or hub name")
    parser.add_argument("--image", help="default: a grey image")
    parser.add_argument("--text", default="a red circle left of a blue square")
    options = parser.parse_args(arguments)

    if options.model:
        model, text, preprocess, *_ = vlp.load(options.model)
    else:
        torch.manual_seed(0)
        model = VLPModel(ModelConfig.model_validate(TINY)).eval()
        text = TextProcessor(train_wordpiece([options.text], 64), max_tokens=16)
        preprocess = Preprocessing(32)
    image = Image.open(options.image) if options.image else Image.new("RGB", (64, 64), "grey")

    tokens = text([options.text])
    with torch.no_grad():
        image_features = model.encode_image(preprocess(image)[None])
        text_features = model.encode_text(*tokens)
    settings = model.config.cross.anchor
    similarity = group_similarity(image_features.tokens, text_features.tokens, settings.groups)
    threshold = float(model.anchor_threshold if options.model else similarity.quantile(0.9))
    distance = anchor_distance(similarity, threshold)
    path, reachable = anchor_path(distance, model.config.image.grid)

    anchor_shares = (similarity >= threshold).float().mean(-1)[0]  # (patches, tokens)
    columns = model.config.image.grid[1]
    for number, word in enumerate(text.pieces(options.text)):
        patch = int(anchor_shares[:, number].argmax())
        share, row, column = float(anchor_shares[patch, number]), patch // columns, patch % columns
        print(f"{word:12} row {row}, column {column}: anchor in {share:.0%} of the groups")
    print(f"{float(reachable.float().mean()):.0%} of all paths reach an anchor")
    return path


if __name__ == "__main__":
    main()
