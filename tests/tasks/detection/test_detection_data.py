import copy
import json
import pickle
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlp.config import ConfigError
from vlp.data.shards.sample_files import BadSample
from vlp.tasks.detection.data import (
    CocoImages,
    CocoSource,
    DetectionDataConfig,
    DetectionSamples,
    ObjectImage,
    SceneImages,
    SceneSource,
    fit_size,
)

GOOD = {
    "images": [{"id": 7, "file_name": "a.png", "width": 40, "height": 20},
               {"id": 3, "file_name": "b.png", "width": 20, "height": 40}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 9, "bbox": [30.0, 5.0, 10.5, 10], "iscrowd": 0},
        {"id": 2, "image_id": 7, "category_id": 4, "bbox": [0, 0, 8, 4], "iscrowd": 1, "area": 9},
    ],
    "categories": [{"id": 9, "name": "cat"}, {"id": 4, "name": "dog"}],
}  # fmt: skip


def write(folder, content, **sizes):
    (folder / "images").mkdir(parents=True)
    for name, size in {"a.png": (40, 20), "b.png": (10, 20), **sizes}.items():
        Image.new("RGB", size).save(folder / "images" / name)
    (folder / "instances.json").write_text(json.dumps(content))
    return CocoSource(
        format="coco", annotations=str(folder / "instances.json"), images=str(folder / "images")
    )


def test_a_small_file_is_read_as_it_says(tmp_path):
    source = write(tmp_path, GOOD)
    with tarfile.open(tmp_path / "images.tar", "w") as archive:
        archive.add(tmp_path / "images", "train2017")
    as_tar = source.model_copy(update={"images": str(tmp_path / "images.tar")})
    for one in (source, as_tar):
        images = pickle.loads(pickle.dumps(CocoImages(one)))  # workers get copies
        assert images.classes == ("dog", "cat")
        first, second = images.read(0), images.read(1)
        assert first.boxes.shape == (0, 4)
        assert (first.width, first.image.width) == (20, 10)  # stored smaller than annotated
        assert second.labels.tolist() == [1, 0]
        assert second.boxes.tolist() == [[30, 5, 40, 15], [0, 0, 8, 4]]  # half a pixel is cut
        assert second.areas.tolist() == [100, 9]
        assert second.crowds.tolist() == [False, True]
    assert CocoImages(source, ["cat", "fox", "dog"]).read(1).labels.tolist() == [0, 2]


def changed(part, number, **values):
    content = copy.deepcopy(GOOD)
    content[part][number].update(values)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed("images", 1, id=7), "images with the same id: 7"),
        (changed("categories", 1, id=9), "categories with the same id: 9"),
        (changed("categories", 1, name=GOOD["categories"][0]["name"]), "with the same name: "),
        ({**GOOD, "images": [{"id": 1}]}, r"images\[0\].file_name Field required"),
        ({**GOOD, "images": []}, "no images, or no categories"),
        ({key: GOOD[key] for key in ("images", "categories")}, "no list 'annotations'"),
        ([1], "no list 'images'"),
    ],
)  # fmt: skip
def test_files_that_contradict_themselves_are_refused(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        CocoImages(write(tmp_path, content))


@pytest.mark.parametrize(
    ("values", "kept", "said"),
    [
        ({"bbox": [30, 5, 20, 10]}, [30, 5, 40, 15], "cut at the edge"),
        ({"bbox": [-4, 5, 10, 10]}, [0, 5, 6, 15], "cut at the edge"),
        ({"bbox": ["30", 5, 10, 10]}, [30, 5, 40, 15], ""),
        ({"bbox": [50, 5, 10, 10]}, None, "1 box outside its image: annotation 1 [50.0, "),
        ({"bbox": [5, 5, 0, 10]}, None, "1 box outside its image"),
        ({"bbox": [0.1, 0.2, 0.9, 0.3]}, None, "1 box in shares of the image"),
        ({"bbox": [5, 5, 10, -3]}, None, "1 box outside its image"),
        ({"bbox": [1, 2, 3]}, None, "1 rows of another layout: annotations[0].bbox"),
        ({"bbox": [1, 2, 3, float("nan")]}, None, "annotations[0].bbox.3"),
        ({"bbox": None}, None, "annotations[0].bbox"),
        ({"image_id": 8}, None, "1 of an image that the file lacks: annotation 1 of 8"),
        ({"category_id": 5}, None, "1 of a category that the file lacks: annotation 1 of 5"),
        ({"image_id": "7", "category_id": "9"}, [30, 5, 40, 15], ""),
        ({"id": None}, [30, 5, 40, 15], ""),
    ],
)
def test_a_bad_row_costs_itself_and_never_the_image(tmp_path, values, kept, said, caplog):
    images = CocoImages(write(tmp_path, changed("annotations", 0, **values)))
    assert images.read(1).boxes.tolist() == [*([kept] if kept else []), [0, 0, 8, 4]]
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


@pytest.mark.parametrize(("crowd", "is_one"), [("0", 0), ("1", 1), ("false", 0), ("", 0)])
def test_crowds_may_be_written_as_text(tmp_path, crowd, is_one):
    images = CocoImages(write(tmp_path, changed("annotations", 0, iscrowd=crowd)))
    assert images.read(1).crowds.tolist() == [bool(is_one), True]


@pytest.mark.parametrize(
    ("area", "kept", "width"), [(7, 7, 40), (0, 50, 0), (-3, 50, 40.4), ("x", 50, None)]
)
def test_an_area_or_size_that_is_none_is_that_of_the_box_or_picture(tmp_path, area, kept, width):
    content = changed("annotations", 0, area=area, bbox=[30, 10, 5, 80])
    content["images"][0]["width"] = width
    assert CocoImages(write(tmp_path, content)).read(1).areas[0] == kept


def test_boxes_that_were_drawn_before_exif_turned_the_image_turn_with_it(tmp_path):
    source = write(tmp_path, GOOD)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "images" / "a.png", exif=exif)
    read = CocoImages(source).read(1)
    assert read.image.size == (read.width, read.height) == (20, 40)
    assert read.boxes.tolist() == [[5, 30, 15, 40], [16, 0, 20, 8]]


def test_names_are_found_by_their_whole_path(tmp_path):
    content = copy.deepcopy(GOOD)
    names = ["cam1/1.png", "cam2/1.png", "caf\u00e9/2.png", "3.png", "../secret.png", "9.png"]
    content["images"] = [
        {"id": n, "file_name": name, "width": 8, "height": 8} for n, name in enumerate(names)
    ]
    content["annotations"] = []
    source = write(tmp_path, content)
    stored = ["cam1/1.png", "cam2/1.png", "cafe\u0301/2.PNG", "deep/3.png", "../secret.png"]
    stored.append(".thumbnails/9.png")  # smaller than the image, which is missing
    for level, name in enumerate(stored):
        (tmp_path / "images" / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (level, 0, 0)).save(tmp_path / "images" / name)
    with tarfile.open(tmp_path / "images.tar", "w") as archive:
        archive.add(tmp_path / "images" / "cam2" / "1.png", "./cam1/1.png")  # mended below
        archive.add(tmp_path / "images", ".")
    for place in ("images", "images.tar"):
        images = CocoImages(source.model_copy(update={"images": str(tmp_path / place)}))
        assert [images.read(n).image.getpixel((0, 0))[0] for n in range(4)] == [0, 1, 2, 3]
        with pytest.raises(BadSample, match=r"missing image: .*secret\.png.*: outside"):
            images.read(4)
        with pytest.raises(BadSample, match=r"missing image: .*9\.png"):
            images.read(5)


def test_an_image_of_several_names_is_left_out(tmp_path):
    content = changed("images", 0, file_name="cam1/a.png")
    content["images"][1].update(file_name="cam2/a.png", width=40, height=20)
    images = CocoImages(write(tmp_path, content))
    with pytest.raises(BadSample, match=r"image of several names: .*cam2/a\.png"):
        images.read(0)
    with pytest.raises(BadSample, match=r"missing image: .*cam1/a\.png"):
        images.read(1)


def test_invalid_text_costs_no_more_than_itself(tmp_path):
    content = changed("images", 0, licence="\U0001f600\ud83d")
    source = write(tmp_path, content)
    file = tmp_path / "instances.json"
    file.write_bytes(file.read_bytes().replace(b'"cat"', b'"c\xffa\\ud83dt"'))
    assert CocoImages(source).classes == ("dog", "c\ufffda\ufffdt")


def test_images_that_are_missing_broken_or_others_are_left_out_by_name(tmp_path):
    images = CocoImages(write(tmp_path, GOOD, **{"a.png": (20, 40)}))
    with pytest.raises(BadSample, match=r"image of another shape: .*20 x 40 px, annotated 40 x 20"):
        images.read(1)
    (tmp_path / "images" / "b.png").write_bytes(b"broken")
    with pytest.raises(BadSample, match="unreadable image"):
        images.read(0)
    (tmp_path / "images" / "b.png").unlink()
    with pytest.raises(BadSample, match=r"missing image: .*b\.png"):
        images.read(0)


SCENES = {"format": "scenes", "count": 12}
PLAIN = {"mean": [0, 0, 0], "std": [1, 1, 1], "hflip": False}
GREY, RED = (90, 90, 90), (250, 0, 0)


def data_config(**options):
    plain = {"train": SCENES, "test": SCENES, "sizes": [64], "canonical_streams": 2}
    return DetectionDataConfig.model_validate(plain | options)


def rng_for(seed):
    return lambda purpose: np.random.default_rng([seed, *purpose.encode()])


class OneObject:
    """A grey image with one red box, and a crowd in the corner."""

    classes = ("red",)

    def __init__(self, stored=1):
        self.stored = stored

    def __len__(self):
        return 1

    def read(self, number):
        image = Image.new("RGB", (60, 40), GREY)
        image.paste(RED, (10, 8, 30, 28))
        boxes = np.array([(10, 8, 30, 28), (0, 0, 5, 5)], dtype=float) * self.stored
        return ObjectImage(
            image, 60 * self.stored, 40 * self.stored, boxes, np.array([0, 0]),
            np.array([400.0, 25.0]), np.array([False, True]), "one",
        )  # fmt: skip


def red_box(pixels):
    """Where the red is, by pixels: left, top, right, bottom as shares."""
    red = (pixels[0] - pixels[1] > 0.3).nonzero()
    (top, left), (bottom, right) = red.min(0).values.tolist(), (red.max(0).values + 1).tolist()
    rows, columns = pixels.shape[1:]
    return torch.tensor([left / columns, top / rows, right / columns, bottom / rows])


def corners_of(boxes):
    return torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], -1)


def test_too_many_objects_are_left_out_by_name():
    samples = DetectionSamples(SceneImages(SceneSource(**SCENES), 64), data_config(), 1)
    crowded = next(n for n in range(12) if len(samples.images.read(n).labels) > 1)
    with pytest.raises(BadSample, match=r"queries: train-0-\d+: [23] objects, 1 queries"):
        samples(crowded, rng_for(0))


def test_scenes_have_their_boxes_at_every_size():
    small, large = (SceneImages(SceneSource(**SCENES), side) for side in (64, 160))
    for number in range(12):
        one, other = small.read(number), large.read(number)
        assert other.image.size == (160, 160)
        assert np.allclose(one.boxes / 64, other.boxes / 160)
        assert one.labels.tolist() == other.labels.tolist()
        assert np.allclose(one.areas, (one.boxes[:, 2:] - one.boxes[:, :2]).prod(-1))
        # Inside a box there is another colour than around all of them.
        pixels = np.asarray(other.image, dtype=int)
        background = pixels[0, 0]
        left, top, right, bottom = np.rint(other.boxes[0]).astype(int)
        assert np.abs(pixels[top:bottom, left:right] - background).max() > 30
    with pytest.raises(ConfigError, match="16 px or more, not 8"):
        SceneImages(SceneSource(**SCENES), 8)


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("crop", [0.0, 1.0])
@pytest.mark.parametrize("stored", [1, 3])
def test_boxes_stay_on_their_objects(hflip, crop, stored):
    plain = data_config(sizes=[160, 240], multiple=8, **PLAIN | {"hflip": hflip, "crop": crop})
    samples = DetectionSamples(OneObject(stored=stored), plain, 100)
    seen = []
    for seed in range(12):
        pixels, boxes, labels = samples(0, rng_for(seed))
        assert labels.tolist() == [0]  # the crowd is no target
        assert torch.allclose(corners_of(boxes)[0], red_box(pixels), atol=0.03)
        seen.append(boxes)
    seen = torch.cat(seen)
    assert len(seen.unique(dim=0)) == (1 if not (hflip or crop) else 2 if not crop else 12)


def test_an_object_outside_of_the_crop_is_none():
    plain = data_config(**PLAIN | {"crop": 1.0, "crop_sides": [0.3, 0.3]})
    samples = DetectionSamples(OneObject(), plain, 100)
    counts = set()
    for seed in range(40):
        pixels, boxes, labels = samples(0, rng_for(seed))
        counts.add(len(labels))
        assert len(boxes) == len(labels) == int(((pixels[0] - pixels[1]) > 0.3).any())
    assert counts == {0, 1}


@given(
    st.integers(1, 2000), st.integers(1, 2000), st.integers(32, 800), st.integers(800, 1400),
    st.sampled_from([1, 8, 32]),
)  # fmt: skip
def test_sizes_are_multiples_and_keep_the_shape(width, height, shortest, longest, multiple):
    wide, high = fit_size(width, height, shortest, longest, multiple)
    assert wide % multiple == high % multiple == 0
    assert multiple <= wide <= longest
    assert multiple <= high <= longest
    assert min(wide, high) <= shortest + multiple / 2
    scale = min(shortest / min(width, height), longest / max(width, height))
    for found, side in ((wide, width), (high, height)):
        assert abs(found - max(scale * side, multiple)) <= multiple
