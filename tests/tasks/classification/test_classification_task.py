import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tests_support import train

from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError
from evaluation.vision import classification as evaluation_classification
from evaluation.vision import evaluate_folder
from vlp.config import ConfigError
from vlp.tasks.classification.data import LabelledBatch
from vlp.tasks.classification.task import Classification, ClassificationConfig
from vlp.tasks.pixels.task import PixelsConfig
from vlp.tasks.vision_only import build_task

SMALL = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


def config(data="unused", positions=(), **options):
    plain = {
        "model": {
            "name": "vit_small_patch16_224",
            "options": SMALL,
            "absolute": "drop",
            "positions": list(positions),
        },
        "data": {"train": str(data), "test": str(data), "image_size": 16, "canonical_streams": 2},
    }
    return ClassificationConfig.model_validate(plain | options)


@pytest.fixture
def corners(tmp_path):
    """Two classes that only a position tells apart: a bright patch above or below."""
    rng = np.random.default_rng(0)
    for name, row in (("above", 0), ("below", 12)):
        (tmp_path / name).mkdir()
        for number in range(24):
            pixels = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8)
            column = 4 * int(rng.integers(4))
            pixels[row : row + 4, column : column + 4] = 255
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    return tmp_path


def batch(rows=6, classes=3):
    labels = torch.arange(rows) % classes
    return LabelledBatch(torch.randn(rows, 3, 16, 16), labels, torch.ones(rows, dtype=torch.bool))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_torchs_cross_entropy(smoothing):
    task = Classification(config(label_smoothing=smoothing), ["a", "b", "c"]).eval()
    given = batch()
    out = task(given, 0)
    logits = task.model(given.pixels)
    expected = F.cross_entropy(logits, given.labels, label_smoothing=smoothing)
    torch.testing.assert_close(out.loss, expected)
    right = (logits.argmax(-1) == given.labels).float().mean()
    assert out.statistics["accuracy"] == right


@pytest.mark.parametrize("mixing", [{"mixup": 0.8}, {"cutmix": 1.0}])
def test_mixing_mixes_targets_as_pixels(mixing):
    task = Classification(config(**mixing), ["a", "b", "c"])
    constant = torch.arange(6.0)[:, None, None, None].expand(-1, 3, 16, 16)
    targets = F.one_hot(torch.arange(6), 6).float()
    shares = set()
    for step in range(20):
        pixels, mixed, done = task._mix(constant, targets, step)
        assert done
        assert torch.allclose(mixed.sum(-1), torch.ones(6))
        # A target is the share of pixels that come from each image.
        mean = (mixed * torch.arange(6.0)).sum(-1)
        torch.testing.assert_close(pixels.mean((1, 2, 3)), mean, atol=1e-5, rtol=0)
        again, _, _ = task._mix(constant, targets, step)
        assert torch.equal(again, pixels)
        shares.add(round(float(mixed[0, 0]), 4))
    assert len(shares) > 5
    unmixed, _, done = task.eval()._mix(constant, targets, 0)
    assert not done
    assert unmixed is constant


def test_it_learns_what_only_positions_tell_and_is_evaluated_from_its_folder(
    corners, tmp_path, monkeypatch
):
    encoding = {"name": "learned-2d", "options": {"deviation": 0.5}}
    torch.manual_seed(0)
    task, data = build_task(config(corners, [encoding]), 16, 0, "float32")
    train(task, data, 60, 3e-3)
    folder = tmp_path / "model"
    task.save_model(folder, dict(task.state_dict()))
    figures = evaluate_folder(folder)
    assert figures["top1"] > 90
    assert figures["loss"] < 0.4
    assert evaluate_folder(folder, options=EvalOptions(limit=2))["top1"] in (0, 50, 100)
    monkeypatch.setattr(evaluation_classification, "BATCH", 10)
    assert evaluate_folder(folder, options=EvalOptions(workers=2)) == evaluate_folder(folder)
    (corners / "below" / "3.png").write_bytes(b"no image")
    said = []
    for workers in (0, 2):
        with pytest.raises(EvaluationError, match="unreadable image") as caught:
            evaluate_folder(folder, options=EvalOptions(workers=workers))
        said.append(str(caught.value).partition(" at 0x")[0])  # Pillow names an address
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("vit_small_patch16_224", {}, (0.5, 0.5, 0.5)),
        ("vit_small_patch16_224", {"std": [0.25, 0.25, 0.25]}, (0.485, 0.456, 0.406)),
        ("vlp_deit_small_patch16_irpe_k_224", {}, (0.485, 0.456, 0.406)),
        ("no_such_vit", {}, (0.485, 0.456, 0.406)),
    ],
)
def test_public_weights_see_pixels_as_they_were_trained_to(name, given, expected):
    data = {"train": "a", "test": "b", **given}
    plain = {"model": {"name": name, "pretrained": True}, "data": data}
    made = ClassificationConfig.model_validate(plain)
    assert made.data.mean == expected
    assert ClassificationConfig.model_validate(made.model_dump(mode="json")) == made
    overlay = {"pretrained_cfg_overlay": {"mean": [0.1, 0.2, 0.3]}}
    plain["model"]["options"] = overlay
    if expected == (0.5, 0.5, 0.5):
        assert ClassificationConfig.model_validate(plain).data.mean == (0.1, 0.2, 0.3)
    fresh = ClassificationConfig.model_validate({"model": {"name": name}, "data": data})
    assert fresh.data.mean == (0.485, 0.456, 0.406)


def test_test_images_are_looked_for_before_training(corners, tmp_path_factory):
    def build(kind, test):
        plain = {"train": str(corners), "test": str(test), "image_size": 16}
        if kind == "pixels":
            return build_task(PixelsConfig.model_validate({"data": plain}), 16, 0, "float32")
        model = config().model.model_dump()
        whole = ClassificationConfig.model_validate({"model": model, "data": plain})
        return build_task(whole, 16, 0, "float32")

    for kind in ("classification", "pixels"):
        with pytest.raises(ConfigError, match="nowhere: there is neither a folder nor a tar file"):
            build(kind, corners / "nowhere")
    other = tmp_path_factory.mktemp("a") / "other"
    shutil.copytree(corners / "above", other / "between")
    with pytest.raises(ConfigError, match="other: unknown classes between"):
        build("classification", other)
    (corners / "between").mkdir()
    with pytest.raises(ConfigError, match="in its class folders between"):
        build("classification", corners)
