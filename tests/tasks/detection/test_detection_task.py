import pytest
import torch
from tests_support import DETECTION_MODEL, OBJECT_CLASSES

from vlp.config import ConfigError
from vlp.tasks.detection.data import DetectionBatch
from vlp.tasks.detection.loss import set_losses
from vlp.tasks.detection.task import DetectionConfig, DetectionTask, build

PLACES = {"name": "learned-2d", "options": {"deviation": 1.0}}


def config(positions=(), data=(), model=(), **options):
    scenes = {"format": "scenes", "count": 8}
    plain = {
        "model": {**DETECTION_MODEL, "positions": list(positions), **dict(model)},
        "data": {"train": scenes, "test": scenes, "sizes": [48], "multiple": 8, "hflip": False,
                 **dict(data)},
    }  # fmt: skip
    return DetectionConfig.model_validate(plain | options)


def batch(*counts, side=32):
    torch.manual_seed(1)
    boxes = [0.2 + 0.5 * torch.rand(count, 4) for count in counts]
    return DetectionBatch(
        tuple(torch.randn(3, side + 8 * (n % 2), side) for n in range(len(counts))),
        tuple(boxes),
        tuple(torch.randint(5, (count,)) for count in counts),
        torch.ones(len(counts), dtype=torch.bool),
    )


def test_the_loss_is_the_sum_over_layers():
    torch.manual_seed(0)
    weights = {"classes": 0.5, "l1": 3.0, "giou": 4.0, "no_object": 0.2}
    task = DetectionTask(config([PLACES], loss=weights), OBJECT_CLASSES)
    given = batch(2, 0, 3)
    out = task(given, 0)
    layers = set_losses(
        *task.model(given.pixels), given.labels, given.boxes, (0.5, 3.0, 4.0), no_object=0.2
    )
    expected = sum(
        0.5 * one.classes.total / one.classes.count + (3 * one.l1.total + 4 * one.giou.total) / 5
        for one in layers
    )
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(out.losses["l1"], layers[-1].l1.total / 5)
    torch.testing.assert_close(out.losses["auxiliary_giou"], layers[0].giou.total / 5)
    assert set(out.losses) == {
        f"{prefix}{name}" for prefix in ("", "auxiliary_") for name in ("classes", "l1", "giou")
    }
    torch.testing.assert_close(out.statistics["overlap"], 1 - layers[-1].giou.total / 5)


def test_auxiliary_losses_are_optional():
    torch.manual_seed(0)
    both = DetectionTask(config([PLACES]), OBJECT_CLASSES)
    last = DetectionTask(config([PLACES], loss={"auxiliary": False}), OBJECT_CLASSES)
    last.load_state_dict(both.state_dict())
    given = batch(2, 1)
    one, other = both(given, 0), last(given, 0)
    assert set(other.losses) == {"classes", "l1", "giou"}
    for name, value in other.losses.items():
        torch.testing.assert_close(one.losses[name], value)
    assert other.loss < one.loss


def test_batches_without_objects_have_finite_gradients():
    task = DetectionTask(config([PLACES]), OBJECT_CLASSES)
    out = task(batch(0, 0), 0)
    out.loss.backward()
    for name, parameter in task.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all()
    assert set(out.losses) == set(task(batch(1), 0).losses)  # ranks agree about the names
    assert set(out.statistics) == set(task(batch(1), 0).statistics)


def test_a_loaded_folder_asks_for_no_public_weights():
    settings = config(model={"backbone": {"name": "test_resnet", "pretrained": True}})
    task = DetectionTask.restore(settings, {"classes": list(OBJECT_CLASSES)})
    assert not task.config.model.backbone.pretrained


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"positions": [PLACES], "data": {"test_sizes": [48, 64]}},
         r"64 x 64 px \(size 64\): learned-2d has vectors for a 6 x 6 grid, not for 8 x 8"),
        ({"positions": [{"name": "irpe-quantization"}], "data": {"sizes": [48, 64]}},
         r"images of 48 x 48 px \(size 48\): irpe-quantization .*8 x 8"),
        ({"positions": [{"name": "learned-1d"}], "data": {"crop": 0.5, "longest": 64}},
         r"learned-1d"),
        ({"data": {"test": {"format": "coco", "annotations": "nowhere", "images": "."}}},
         "nowhere: cannot be read"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_before_anything_is_trained(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(config(**settings), 8, 0, "float32")
