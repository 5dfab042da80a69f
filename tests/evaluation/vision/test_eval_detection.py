import json

import pytest
import torch
from PIL import Image
from tests_support import DETECTION_MODEL, OBJECT_CLASSES

from evaluation.options import EvalOptions
from evaluation.vision.detection import evaluate
from vlp.config import ConfigError
from vlp.data.shards.sample_files import BadSample
from vlp.tasks.detection.data import open_objects
from vlp.tasks.detection.model import Detections
from vlp.tasks.detection.task import DetectionConfig, DetectionTask

SCENES = {"format": "scenes", "count": 8}


def config(position="learned-2d", source=SCENES, **data):
    options = {"deviation": 1.0} if position == "learned-2d" else {}
    return DetectionConfig.model_validate(
        {
            "model": {**DETECTION_MODEL, "positions": [{"name": position, "options": options}]},
            "data": {"train": source, "test": source, "sizes": [48], "multiple": 8,
                     "hflip": False, **data},
        }
    )  # fmt: skip


class Oracle(torch.nn.Module):
    """In place of a model: says what the next image in order holds, one query too many."""

    def __init__(self, images, order):
        super().__init__()
        self.seen = []
        self.answers = {}
        for number in order:
            read = images.read(number)
            self.answers[number] = (read.boxes / ([read.width, read.height] * 2), read.labels)
        self.order = list(order)

    def forward(self, given):
        shapes = {tuple(image.shape) for image in given}
        assert len(shapes) == 1  # only images of one size come together
        self.seen.append((len(given), *shapes.pop()))
        logits = torch.full((1, len(given), 12, 6), -20.0)
        logits[..., -1] = 0
        boxes = torch.rand(1, len(given), 12, 4)
        for row in range(len(given)):
            corners, labels = self.answers[self.order.pop(0)]
            for query, (label, box) in enumerate(zip(labels, torch.from_numpy(corners))):
                logits[0, row, query, label] = 20.0
                boxes[0, row, query] = torch.cat([(box[:2] + box[2:]) / 2, box[2:] - box[:2]])
        return Detections(logits, boxes)


@pytest.mark.parametrize(("limit", "workers"), [(None, None), (5, None), (None, 2)])
def test_right_answers_have_full_precision_at_every_size(limit, workers):
    source = {"format": "scenes", "count": 21, "split": "val"}
    task = DetectionTask(config(test=source, test_sizes=[48, 80]), OBJECT_CLASSES)
    images = open_objects(task.config.data.test, 48)
    order = range(21) if limit is None else (0, 5, 10, 15, 20)
    task.model = Oracle(images, [*order, *order])
    figures = evaluate(task, EvalOptions(limit=limit, device="cpu", workers=workers))
    for name in ("AP", "AP50", "AP75", "AP@80", "AR100@80"):
        assert figures[name] == pytest.approx(100)
    assert task.training  # the mode is as before
    count = limit or 21
    assert sum(shape[0] for shape in task.model.seen) == 2 * count
    assert {shape[1:] for shape in task.model.seen} == {(3, 48, 48), (3, 80, 80)}


@pytest.mark.parametrize("name", ["learned-2d", "learned-1d", "irpe-quantization"])
def test_sizes_that_an_encoding_cannot_serve_are_refused_by_name(name):
    task = DetectionTask(config(name, test_sizes=[64]), OBJECT_CLASSES)
    with pytest.raises(ConfigError, match=f"images of size 64: {name} "):
        evaluate(task, EvalOptions(limit=2))


def test_real_images_are_evaluated_in_their_own_pixels(shared):
    folder = shared / "data" / "coco_mini"
    source = {"format": "coco", "images": str(folder / "val2017_short256.tar")}
    source["annotations"] = str(folder / "annotations" / "instances_val2017.json")
    settings = config("irpe-product", source, sizes=[64], longest=120)
    images = open_objects(settings.data.test, 64)
    task = DetectionTask(settings, images.classes)
    assert evaluate(task, EvalOptions(limit=20))["AP"] < 5

    class Largest(torch.nn.Module):
        def forward(self, given):
            logits = torch.full((1, len(given), 1, 81), -20.0)
            logits[..., 0] = 20.0
            return Detections(logits, torch.tensor([0.5, 0.5, 1, 1]).expand(1, len(given), 1, 4))

    task.model = Largest()
    # Right at IoU 0.5 where a person fills the image, whatever size it was shown at.
    large, people, classes = 0, 0, set()
    for sample in map(images.read, range(len(images))):
        person = (sample.labels == 0) & ~sample.crowds
        areas = (sample.boxes[:, 2:] - sample.boxes[:, :2]).prod(1)
        large += (areas[person] >= 0.5 * sample.width * sample.height).any()
        people += person.sum()
        classes |= {*sample.labels[~sample.crowds].tolist()}
    figures = evaluate(task, EvalOptions())
    assert 0 < figures["AR1"] <= 100 * large / people / len(classes) + 1e-6


def test_bad_test_images_are_named_and_a_bad_box_costs_itself(tmp_path, caplog):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 64, "height": 64}],
        "annotations": [
            {"id": n, "image_id": 1, "category_id": 1, "bbox": box}
            for n, box in enumerate(([60, 0, 40, 10], [64, 0, 9, 9], [5, 5, 9, 9]))
        ],
        "categories": [{"id": n, "name": name} for n, name in enumerate(OBJECT_CLASSES, 1)],
    }
    file = tmp_path / "instances.json"
    file.write_text(json.dumps(content))
    source = {"format": "coco", "annotations": str(file), "images": str(tmp_path)}
    task = DetectionTask(config("irpe-product", source, longest=64), OBJECT_CLASSES)
    assert "AP" in evaluate(task, EvalOptions())
    assert "1 box outside its image: annotation 1 [64.0, 0.0, 9.0, 9.0]" in caplog.text
    Image.new("RGB", (32, 64)).save(tmp_path / "a.png")
    with pytest.raises(BadSample, match=r"of another shape: .*32 x 64 px, annotated 64 x 64"):
        evaluate(task, EvalOptions())
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    content["annotations"] = []
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="no object in 1 images"):
        evaluate(task, EvalOptions())
    task.classes = ("circle", "square", "cat", "dog", "cross")
    with pytest.raises(ConfigError, match=r"unknown categories triangle, star \(2 of 5\)"):
        evaluate(task, EvalOptions())
