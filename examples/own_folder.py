"""Turn a folder of NAME.jpg and NAME.txt files into shards and pretrain for a few steps on a CPU.

python examples/own_folder.py --images my_images/ --out runs/own
python examples/own_folder.py --out runs/own        (a few generated images instead)
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from PIL import Image, ImageDraw

from data_tools.__main__ import main as data_tools
from launch.pretrain import main as pretrain
from vlp.data.schema import Annotation
from vlp.data.shards.shard_writer import ShardWriter

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "pretrain" / "scenes_tiny.yaml"


def main(arguments: list[str] | None = None) -> int:
    """Write shards, train a vocabulary, pretrain; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, help="folder of NAME.jpg and NAME.txt")
    parser.add_argument("--out", type=Path, default=Path("runs/own"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="a multiple of 16")
    options = parser.parse_args(arguments)

    images = options.images or generate(options.out / "images", count=2 * options.batch)
    shards = write_shards(images, options.out / "shards")
    vocabulary = options.out / "vocabulary"
    data_tools(["vocabulary", "--shards", str(shards), "--size", "256", "--out", str(vocabulary)])
    return pretrain(
        [
            *("--config", str(CONFIG)),
            f"output={options.out / 'run'}",
            f"data.sources=[{{path: {shards}}}]",
            f"data.vocabulary={vocabulary}",
            f"training.steps={options.steps}",
            f"training.batch={options.batch}",
            *("training.log_every=1", "training.optimiser.warmup_steps=1"),
            *("objectives.itm.group=16", "data.workers=0"),
        ]
    )


def write_shards(images: Path, out: Path) -> Path:
    """Write every image that has a caption; returns the folder of the shards."""
    with ShardWriter(out) as writer:
        for file in sorted(images.glob("*.jpg")):
            caption = file.with_suffix(".txt").read_text(encoding="utf-8").strip()
            if file.stem not in writer.done:
                writer.write(file.stem, file.read_bytes(), "jpg", Annotation(caption=caption))
    return out


def generate(folder: Path, count: int) -> Path:
    """Draw images of one coloured shape with a caption each; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    choose = random.Random(0)
    for number in range(count):
        colour, shape = choose.choice(["red", "green", "blue"]), choose.choice(["circle", "square"])
        image = Image.new("RGB", (64, 64), "white")
        x, y = choose.randrange(40), choose.randrange(40)
        draw = ImageDraw.Draw(image)
        (draw.ellipse if shape == "circle" else draw.rectangle)((x, y, x + 20, y + 20), fill=colour)
        image.save(folder / f"{number:04}.jpg")
        (folder / f"{number:04}.txt").write_text(f"a {colour} {shape}\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
