"""The smallest ablation that trains: two variants of a vision model on sixteen images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tiny_ablation(tmp_path):
    """Return the configuration's file."""
    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(level - 40, level + 40, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    tiny = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    overrides = {
        "task.model.options": tiny,
        "task.data.train": str(tmp_path / "images"),
        "task.data.test": str(tmp_path / "images"),
        "task.data.image_size": 16,
        "training.batch": 8,
        "training.steps": 2,
        "training.optimiser.warmup_steps": 0,
    }
    plain = {
        "output": str(tmp_path / "out"),
        "seeds": [0, 1],
        "training": {
            "config": str(ROOT / "configs/vision/cifar10_vit_tiny.yaml"),
            "overrides": overrides,
        },
        "variants": {"none": {"overrides": {"task.model.positions": []}}, "ape": {}},
        "tables": [
            {
                "title": "Table 1",
                "figures": {"top-1": "top1", "loss": "loss"},
                "paper": ["top-1"],
                "reference": "none",
                "rows": [
                    {"label": "None", "variant": "none", "paper": [70.0]},
                    {"label": "APE", "variant": "ape", "paper": [87.41]},
                ],
            }
        ],
    }
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(plain))
    return file
