from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path

import pytest
from benchmark_files import failures_of, json_of, samples_of
from PIL import Image
from raw_images import raw_image

from data_tools.__main__ import main
from vlp.data.schema import captions_of


def test_real_coco_from_official_files(shared: Path, tmp_path: Path) -> None:
    data = shared / "data" / "coco_mini"
    files = [str(data / "annotations" / f"captions_{split}2017.json") for split in ("train", "val")]
    places = [str(path) for path in data.glob("*_short256.tar")]
    arguments = ["coco", "--annotations", *files, "--images", *places, "--out", str(tmp_path)]
    assert main(arguments) == 0
    for split, count, file in (("train2017", 80, files[0]), ("val2017", 79, files[1])):
        samples = samples_of(tmp_path / split)
        assert len(samples) == count
        content = json.loads(Path(file).read_text())
        assert list(samples) == [image["file_name"][:-4] for image in content["images"]]
        for image in content["images"]:
            about = samples[image["file_name"][:-4]].annotation
            assert (about.source, about.image_id) == ("coco", str(image["id"]))
            assert (about.model_extra or {})["url"] == image["coco_url"]
            assert captions_of(about) == [
                " ".join(row["caption"].split())
                for row in content["annotations"]
                if row["image_id"] == image["id"]
            ]


def test_words_of_real_captions_have_the_boxes_that_they_name(shared: Path, tmp_path: Path) -> None:
    data = shared / "data" / "coco_mini"
    files = {
        kind: data / "annotations" / f"{kind}_val2017.json" for kind in ("captions", "instances")
    }
    arguments = ["coco", "--annotations", str(files["captions"]), "--out", str(tmp_path)]
    arguments += ["--instances", str(files["instances"])]
    assert main([*arguments, "--images", str(data / "val2017_short256.tar")]) == 0
    content = json.loads(files["instances"].read_text())
    names = {category["id"]: category["name"] for category in content["categories"]}
    sizes = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    asked = {"object": 0, "objects": 0}
    for sample in samples_of(tmp_path / "val2017").values():
        about, size = sample.annotation, Image.open(io.BytesIO(sample.image)).size
        number = int(about.image_id or 0)
        objects = [one for one in content["annotations"] if one["image_id"] == number]
        assert len(about.boxes or ()) == sum(not one["iscrowd"] for one in objects)
        for word in about.words or ():
            caption = captions_of(about)[word.caption].lower()
            assert re.findall(r"\w+|[^\w\s]", caption)[word.index] == word.word
            boxes = [[p / sizes[number][a % 2] for a, p in enumerate(o["bbox"])] for o in objects]
            meant = []
            for own in (word.box, *(word.others or ())):
                shares = [place / size[axis % 2] for axis, place in enumerate(own)]
                meant += [o for o, b in zip(objects, boxes) if b == pytest.approx(shares, abs=1e-3)]
            (category,) = {one["category_id"] for one in meant}
            assert len(meant) == [o["category_id"] for o in objects].count(category)
            assert word.kind == "objects" or len(meant) == 1
            asked[word.kind] += word.word in names[category]
    assert asked["object"] > 150
    assert asked["objects"] > 50


def test_instances_go_with_official_captions(
    karpathy: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["coco", "--annotations", str(karpathy), "--images", str(tmp_path / "all.zip")]
    content: dict[str, list[object]] = {"images": [], "annotations": [], "categories": []}
    file = json_of(tmp_path / "instances.json", content)
    assert main([*arguments, "--instances", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "goes with official captions" in capsys.readouterr().err


def test_real_originals_are_reduced(shared: Path, tmp_path: Path) -> None:
    data = shared / "data" / "coco_mini"
    arguments = ["coco", "--annotations", str(data / "annotations" / "captions_val2017.json")]
    arguments += ["--images", str(data / "val2017_original_16.tar"), "--max-side", "256"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    samples = samples_of(tmp_path / "val2017")
    assert len(samples) == 16
    for sample in samples.values():
        assert max(Image.open(io.BytesIO(sample.image)).size) == 256
    assert len(failures_of(tmp_path / "val2017")["missing image"]) == 63


@pytest.fixture
def karpathy(tmp_path: Path) -> Path:
    """COCO in Karpathy's layout, its images in a zip of the official layout."""
    images = [
        {"filename": f"COCO_{folder}_{number:012d}.jpg", "filepath": folder, "split": split,
         "cocoid": number, "sentences": [{"raw": f"image {number}"}]}
        for number, folder, split in [
            (9, "train2014", "train"), (42, "val2014", "restval"),
            (73, "val2014", "val"), (74, "val2014", "test"),
        ]
    ]  # fmt: skip
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for image in images:
            number = image["cocoid"]
            archive.writestr(f"{image['filepath']}/{image['filename']}", raw_image(number))
    return json_of(tmp_path / "dataset_coco.json", {"dataset": "coco", "images": images})


def test_karpathys_splits(karpathy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["coco", "--annotations", str(karpathy), "--images", str(tmp_path / "all.zip")]
    assert main([*arguments, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["test", "train", "val"]
    train = samples_of(out / "train")
    assert list(train) == ["COCO_train2014_000000000009", "COCO_val2014_000000000042"]
    about = train["COCO_val2014_000000000042"]
    assert about.image == raw_image(42)
    assert (about.annotation.source, about.annotation.image_id) == ("coco", "42")
    assert list(samples_of(out / "test")) == ["COCO_val2014_000000000074"]


def test_what_cannot_be_asked_for(
    karpathy: Path, tmp_path: Path, shared: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = shared / "data" / "coco_mini" / "annotations"
    official = folder / "captions_val2017.json"
    places = ["--images", str(tmp_path), "--out", str(tmp_path / "out")]
    both = ["coco", "--annotations", str(karpathy), str(official), *places]
    assert main(both) == 2
    assert "not both at once" in capsys.readouterr().err
    for file, known in ((karpathy, "test, train, val"), (official, "val2017")):
        assert main(["coco", "--annotations", str(file), *places, "--splits", "dev"]) == 2
        assert f"there is no 'dev', only {known}" in capsys.readouterr().err
    wrong = folder / "instances_val2017.json"
    assert main(["coco", "--annotations", str(wrong), *places]) == 2
    assert "is it the right file?" in capsys.readouterr().err
