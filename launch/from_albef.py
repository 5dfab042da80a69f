"""Make a model folder of a public ALBEF checkpoint, with ACE-RPE added and still without effect.

    python launch/from_albef.py --checkpoint ALBEF.pth --vocabulary bert-base-uncased \\
        --out models/albef --image-size 384 [cross.anchor.mode=bias ...]

Sizes are read from the checkpoint. The tables of ACE-RPE start at zero: the folder's model scores
as the checkpoint does, and fine-tuning starts from there. Overrides change the model's
configuration, written as in a configuration file (`cross.anchor.groups=16`, `cross.position=[]`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from vlp.config import ConfigError, load_config, save_config
from vlp.data.image.transforms import Preprocessing
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.config import ModelConfig
from vlp.models.folder import CONFIG, save_pretrained
from vlp.models.pretrained.albef import MEAN, STD, albef_config, load_albef
from vlp.models.pretrained.pth import read_pth
from vlp.models.vlp import VLPModel


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and write the folder; returns the exit code (2: wrong input)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FILE", help="the .pth")
    parser.add_argument(
        "--vocabulary", required=True, metavar="NAME", help="folder or hub name of its BERT"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--image-size", type=int, metavar="PX", help="side of images (default: the checkpoint's)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    chosen = parser.parse_intermixed_args(arguments)
    try:
        convert(
            chosen.checkpoint, chosen.vocabulary, chosen.out, chosen.image_size, chosen.overrides
        )
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def convert(
    checkpoint: Path,
    vocabulary: str,
    out: Path,
    image_size: int | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Write the model folder and print what became of every part of the checkpoint.

    Raises:
        ConfigError: an override or the vocabulary is of no use.
        ValueError: the checkpoint is not ALBEF's, or its vocabulary is another one.
        OSError: the checkpoint is missing, or the folder holds a model already.
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
    for report in load_albef(model, state, checkpoint.name):
        print(report)
    preprocessing = Preprocessing(config.image.image_size, MEAN, STD)
    save_pretrained(out, config, model.state_dict(), text, preprocessing)
    print(f"{out}: {sum(weight.numel() for weight in model.parameters()):,} parameters")


def _with_overrides(config: ModelConfig, overrides: Sequence[str]) -> ModelConfig:
    with tempfile.TemporaryDirectory(prefix="vlp-albef-") as folder:
        file = Path(folder) / "albef.yaml"
        save_config(config, file)
        return load_config(file, ModelConfig, overrides)


if __name__ == "__main__":
    sys.exit(main())
