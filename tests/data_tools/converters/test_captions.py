import io
import json
import re
import zipfile

import pytest
from benchmark_files import failures_of, json_of, samples_of, tar_of
from PIL import Image
from raw_images import raw_image
from test_contract import region

from data_tools.__main__ import main
from vlp.data.schema import captions_of

NUMBERS = (1000092795, 10002456, 1000268201, 1000344755)


@pytest.fixture
def photos(tmp_path):
    files = {f"flickr30k-images/{number}.jpg": raw_image(number) for number in NUMBERS}
    return tar_of(tmp_path / "flickr30k-images.tar", files)


@pytest.fixture
def token(tmp_path):
    lines = [
        f"{number}.jpg#{place}\tcaption {place} of {number} ."
        for number in NUMBERS
        for place in range(5)
    ]
    path = tmp_path / "results_20130124.token"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_official_captions_with_lists(photos, token, tmp_path):
    for name, numbers in (("train", NUMBERS[:2]), ("val", NUMBERS[2:3])):
        end = ".jpg" if name == "val" else ""
        (tmp_path / f"{name}.txt").write_text("".join(f"{number}{end}\n" for number in numbers))
    out = tmp_path / "out"
    arguments = ["flickr30k", "--annotations", str(token), "--images", str(photos)]
    lists = ["--lists", str(tmp_path / "train.txt"), str(tmp_path / "val.txt")]
    assert main([*arguments, *lists, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["train", "val"]
    train = samples_of(out / "train")
    assert list(train) == [str(number) for number in NUMBERS[:2]]
    about = train["10002456"].annotation
    assert (about.source, about.image_id) == ("flickr30k", "10002456")
    assert captions_of(about) == [f"caption {place} of 10002456 ." for place in range(5)]
    assert main([*arguments, "--out", str(tmp_path / "all")]) == 0
    assert len(samples_of(tmp_path / "all" / "all")) == 4


def test_lists_name_images_by_path_or_by_a_unique_base_name(tmp_path):
    names = ["a/1.png", "b/1.png", "c/2.jpeg"]
    for number, name in enumerate(names):
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        (tmp_path / "images" / name).write_bytes(raw_image(number))
    token = tmp_path / "all.token"
    token.write_text("".join(f"{name}#0\tof {name}\n" for name in names))
    (tmp_path / "train.txt").write_text("a/1.png\n2\n1\n")
    (tmp_path / "val.txt").write_text("b/1\n")
    lists = ["--lists", str(tmp_path / "train.txt"), str(tmp_path / "val.txt")]
    arguments = ["flickr30k", "--annotations", str(token), "--images", str(tmp_path / "images")]
    assert main([*arguments, *lists, "--out", str(tmp_path / "out")]) == 0
    assert list(samples_of(tmp_path / "out" / "train")) == ["a_1", "2"]
    assert list(samples_of(tmp_path / "out" / "val")) == ["b_1"]
    ambiguous = {"listed image without captions": [f"{tmp_path / 'train.txt'}: 1"]}
    assert failures_of(tmp_path / "out" / "train") == ambiguous


def test_what_cannot_be_used(photos, token, tmp_path, capsys):
    arguments = ["flickr30k", "--images", str(photos), "--out", str(tmp_path / "out")]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("10002456\n")
    lists = ["--lists", str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert main([*arguments, "--annotations", str(token), *lists]) == 2
    assert "b.txt: 10002456.jpg is in the list a, too" in capsys.readouterr().err
    path = json_of(tmp_path / "dataset.json", {"dataset": "flickr30k", "images": []})
    assert main([*arguments, "--annotations", str(path), *lists]) == 2
    assert "the JSON has its own splits" in capsys.readouterr().err
    for text, code in (("no tab here\n", 2), (token.read_text() + "no tab here\n", 0)):
        token.write_text(text)
        assert main([*arguments, "--annotations", str(token)]) == code
        said = capsys.readouterr()
        line = f"results_20130124.token, line {1 if code else 21}"
        assert f"{line}: this should be" in said.err or f"{line})" in said.out


def test_words_of_real_captions_have_the_boxes_that_they_name(shared, tmp_path):
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
            for own in word.boxes:
                shares = [place / size[axis % 2] for axis, place in enumerate(own)]
                meant += [o for o, b in zip(objects, boxes) if b == pytest.approx(shares, abs=1e-3)]
            (category,) = {one["category_id"] for one in meant}
            assert len(meant) == [o["category_id"] for o in objects].count(category)
            assert word.kind == "objects" or len(meant) == 1
            asked[word.kind] += word.word in names[category]
    assert asked["object"] > 150
    assert asked["objects"] > 50


@pytest.fixture
def karpathy(tmp_path):
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


def test_karpathys_splits(karpathy, tmp_path):
    out, content = tmp_path / "out", json.loads(karpathy.read_text())
    # A bad sentence costs itself, and a split is never a path out of OUT.
    content["images"][0] |= {"cocoid": "x", "sentences": [None, {"raw": "image 9"}]}
    content["images"].append({**content["images"][1], "split": "../evil"})
    json_of(karpathy, content)
    arguments = ["coco", "--annotations", str(karpathy), "--images", str(tmp_path / "all.zip")]
    assert main([*arguments, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["test", "train", "val"]
    train = samples_of(out / "train")
    assert list(train) == ["COCO_train2014_000000000009", "COCO_val2014_000000000042"]
    about = train["COCO_val2014_000000000042"]
    assert about.image == raw_image(42)
    assert (about.annotation.source, about.annotation.image_id) == ("coco", "42")
    assert list(samples_of(out / "test")) == ["COCO_val2014_000000000074"]
    assert list(failures_of(out / "test")) == ["row of another layout"]
    assert not (tmp_path / "evil").exists()


def test_boxes_of_another_image_with_the_same_id_are_left_out(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(raw_image(0))
    texts = [{"id": 1, "image_id": 1, "caption": "a dog"}]
    images = [{"id": 1, "file_name": "a.jpg", "width": 64, "height": 48}]
    path = json_of(tmp_path / "captions_a.json", {"images": images, "annotations": texts})
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 9, 9], "iscrowd": 0}]
    content = {"annotations": boxes, "categories": [{"id": 1, "name": "dog"}]}
    content["images"] = [{**images[0], "file_name": "b.jpg"}]
    arguments = ["coco", "--annotations", str(path), "--images", str(tmp_path / "images")]
    arguments += ["--instances", str(json_of(tmp_path / "instances_b.json", content))]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert samples_of(tmp_path / "out" / "a")["a"].annotation.boxes is None


def test_what_cannot_be_asked_for(karpathy, tmp_path, shared, capsys):
    official = shared / "data" / "coco_mini" / "annotations" / "captions_val2017.json"
    places = ["--images", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["coco", "--annotations", str(karpathy), str(official), *places]) == 2
    assert "not both at once" in capsys.readouterr().err


def test_cocos_images_have_cocos_identity(tmp_path):
    regions = [
        {"id": number, "regions": [region(10 * number, "a dog", 20, 10, 100, 40)]}
        for number in (1, 2, 3)
    ]
    data = [
        {"image_id": 1, "width": 200, "height": 100, "coco_id": 139, "flickr_id": 5, "url": "u1"},
        {"image_id": 2, "width": 200, "height": 100, "coco_id": None, "flickr_id": None},
    ]
    for number in (1, 2, 3):
        (tmp_path / f"{number}.jpg").write_bytes(raw_image(number, (100, 50)))
    arguments = ["visual_genome", "--images", str(tmp_path), "--out", str(tmp_path / "out")]
    arguments += ["--regions", str(json_of(tmp_path / "regions.json", regions))]
    assert main([*arguments, "--image-data", str(json_of(tmp_path / "data.json", data))]) == 0
    samples = samples_of(tmp_path / "out")
    assert {
        key: (sample.annotation.source, sample.annotation.image_id)
        for key, sample in samples.items()
    } == {"vg-1": ("coco", "139"), "vg-2": ("visual_genome", "2"), "vg-3": ("visual_genome", "3")}
    # The images are smaller than those the boxes were drawn on: their sizes are in image_data.
    boxes = [
        expression.box
        for sample in samples.values()
        for expression in sample.annotation.expressions or []
    ]
    assert boxes == [[10, 5, 50, 20], [10, 5, 50, 20], [20, 10, 80, 40]]
    assert failures_of(tmp_path / "out") == {
        "box cut at the edge of its image (kept)": ["vg-3/expression 30"]
    }


def test_albefs_filters_of_regions(tmp_path):
    """Images of evaluation sets, small regions, short phrases; duplicates go without an option."""
    sizes = [("a dog", 40, 30), ("dog", 40, 30), ("a tiny cat", 20, 9), ("a dog", 50, 50)]
    phrases = list(enumerate(sizes))
    regions = [
        {"id": n, "regions": [region(10 * n + k, t, 0, 0, w, h) for k, (t, w, h) in phrases]}
        for n in (1, 2)
    ]
    data = [{"image_id": n, "width": 100, "height": 100, "coco_id": 138 + n} for n in (1, 2)]
    (tmp_path / "excluded.txt").write_text("140\n")
    for number in (1, 2):
        (tmp_path / f"{number}.jpg").write_bytes(raw_image(number, (100, 100)))
    arguments = ["visual_genome", "--images", str(tmp_path), "--out", str(tmp_path / "out")]
    arguments += ["--regions", str(json_of(tmp_path / "regions.json", regions))]
    limits = ["--min-words", "2", "--min-area", "0.02", "--exclude", str(tmp_path / "excluded.txt")]
    assert main([*arguments, *limits]) == 2  # sizes and COCO's numbers are missing
    arguments += ["--image-data", str(json_of(tmp_path / "data.json", data)), *limits]
    assert main(arguments) == 0
    [(key, sample)] = samples_of(tmp_path / "out").items()
    assert (key, captions_of(sample.annotation)) == ("vg-1", ["a dog"])
    assert failures_of(tmp_path / "out") == {
        "shorter than --min-words": ["vg-1/region 11"],
        "region smaller than --min-area": ["vg-1/region 12"],
        "image of an evaluation set": ["vg-2"],
    }
