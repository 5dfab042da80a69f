import tarfile
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from retrieval_stub import png

from vlp.config import ConfigError
from vlp.data.boxes import turn_of
from vlp.data.labelled_images import open_labelled, require_images
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.stream.loader import LabelledImagesConfig
from vlp.tasks.classification.data import LabelledDataConfig, LabelledSamples, labelled_data
from vlp.tasks.detection.data import DetectionDataConfig
from vlp.tasks.widgets.data import RicoScreensConfig

CLASSES = ("blue", "red")
COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


@pytest.fixture
def folder(tmp_path):
    for name, colour in COLOURS.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            (tmp_path / "images" / name / f"{number}.png").write_bytes(png(colour))
    return tmp_path / "images"


def as_tar(folder, file, mode):
    with tarfile.open(file, mode) as archive:
        archive.add(folder, "train")
    return file


def as_shards(folder, out):
    with ShardWriter(out, samples_per_shard=5) as writer:
        for file in sorted(folder.glob("*/*.png")):
            label = Annotation(label=file.parent.name)
            writer.write(f"{file.parent.name}{file.stem}", file.read_bytes(), "png", label)
    return out


def config(train, **options):
    plain = {"train": str(train), "test": str(train), "image_size": 8, "canonical_streams": 2}
    return LabelledDataConfig.model_validate(plain | options)


def test_folders_tars_and_shards_hold_the_same(folder, tmp_path):
    opened = [
        open_labelled(str(folder)),
        open_labelled(str(as_tar(folder, tmp_path / "a.tar", "w"))),
        open_labelled(str(as_tar(folder, tmp_path / "a.tar.xz", "w:xz"))),
        open_labelled(str(as_shards(folder, tmp_path / "shards")), CLASSES),
    ]
    for images in opened:
        assert images.classes == CLASSES
        assert len(images) == 16
        for number in (0, 7, 8, 15):
            read = images.read(number)
            assert read.image.getpixel((0, 0)) == COLOURS[CLASSES[read.label]]
        labels = [images.read(number).label for number in range(16)]
        assert labels == [0] * 8 + [1] * 8


def test_class_folders_may_hold_folders_and_any_extension(folder, tmp_path):
    for name in ("deep/er/0.JPG", "1.gif", "2.JFIF", "3.jpe", ".hidden/4.png"):
        (folder / "red" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "red").save(folder / "red" / name, "png")
    for name in ("@eaDir", "__MACOSX/red", ".ipynb_checkpoints"):  # no classes
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), "red").save(folder / name / "0.png")
    for place in (folder, as_tar(folder, tmp_path / "a.tar", "w")):
        images = open_labelled(str(place))
        assert images.classes == CLASSES
        require_images(str(place), CLASSES)
        read = [images.read(number) for number in range(len(images))]
        assert [row.label for row in read] == [0] * 8 + [1] * 12
        assert {row.image.getpixel((0, 0)) for row in read[8:]} == {COLOURS["red"]}


def test_loops_of_links_end(folder):
    (folder / "red" / "again").symlink_to(folder)
    (folder / "red" / "blues").symlink_to(folder / "blue")
    (folder / "blue" / "back").symlink_to("../red")
    images = open_labelled(str(folder), CLASSES)
    assert [images.read(number).label for number in range(len(images))] == [0] * 16 + [1] * 16


def test_the_last_of_equal_member_names_counts(folder, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(folder, "train")
        archive.add(folder / "red" / "0.png", "train/blue/0.png")
    images = open_labelled(str(tmp_path / "a.tar"))
    assert len(images) == 16
    read = [images.read(number) for number in range(16)]
    assert sorted(row.image.getpixel((0, 0)) for row in read if row.label == 0)[-1] == (255, 0, 0)


def test_a_tar_of_several_data_sets_is_refused(folder, tmp_path):
    (tmp_path / "split" / "test" / "red").mkdir(parents=True)
    (tmp_path / "split" / "test" / "red" / "0.png").write_bytes(png("red"))
    folder.rename(tmp_path / "split" / "train")
    with pytest.raises(ConfigError, match="its class folders lie in test, train"):
        open_labelled(str(tmp_path / "split"))
    folder = tmp_path / "split" / "train"
    with tarfile.open(tmp_path / "both.tar", "w") as archive:
        for part in ("train", "test"):
            archive.add(folder, part)
    with pytest.raises(ConfigError, match=r"both\.tar: its class folders lie in test, train"):
        open_labelled(str(tmp_path / "both.tar"))


def test_unusable_folders_and_tars_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="neither a folder nor a tar file"):
        open_labelled(str(tmp_path / "nowhere"))
    (tmp_path / "bad.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ConfigError, match=r"bad\.tar: not a readable tar file"):
        open_labelled(str(tmp_path / "bad.tar"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no images in class folders"):
        open_labelled(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="unknown classes red"):
        open_labelled(str(folder), ["blue", "green"])
    shards = as_shards(folder, tmp_path / "shards")
    with pytest.raises(ConfigError, match="shards need `classes`"):
        open_labelled(str(shards))
    with pytest.raises(BadSample, match="label 'red'"):
        open_labelled(str(shards), ["blue"]).read(15)
    with pytest.raises(ConfigError, match=r"limit 17 is more than the 16 images"):
        labelled_data(open_labelled(str(folder)), config(folder, limit=17), 4, 0)
    with pytest.raises(ConfigError, match=r"batch 3 is not a multiple of task\.data"):
        labelled_data(open_labelled(str(folder)), config(folder), 3, 0)
    with pytest.raises(ConfigError, match="policy 'nonsense'"):
        LabelledSamples(open_labelled(str(folder)), config(folder, augment={"policy": "nonsense"}))


def test_bad_images_are_counted_and_skipped(folder):
    (folder / "red" / "3.png").write_bytes(b"broken")
    data = labelled_data(open_labelled(str(folder)), config(folder), 4, 0)
    batches = [batch for batch, _ in data.batches(stop_after=4)]
    assert sum(len(batch.labels) for batch in batches) == 15
    (skip,) = [skip for batch in batches for skip in batch.skipped]
    assert skip.kind == "unreadable image"
    assert skip.where.startswith(str(folder / "red" / "3.png"))
    for batch in batches:
        assert len(batch.pixels) == len(batch.labels) == int(batch.valid.sum())


def rng_for(seed):
    return lambda purpose: np.random.default_rng([seed, len(purpose)])


def test_shifts_fill_with_black(folder):
    plain = config(folder, mean=[0, 0, 0], std=[1, 1, 1], augment={"shift": 2, "hflip": False})
    samples = LabelledSamples(open_labelled(str(folder)), plain)
    image = Image.fromarray(np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3))
    whole = np.asarray(image, dtype=np.float32) / 255
    padded = np.pad(whole, ((2, 2), (2, 2), (0, 0)))
    windows = [padded[a : a + 8, b : b + 8] for a in range(5) for b in range(5)]
    kinds = set()
    for seed in range(60):
        pixels = samples.pixels(image, rng_for(seed)).permute(1, 2, 0).numpy()
        hits = [n for n, window in enumerate(windows) if np.allclose(window, pixels, atol=1e-6)]
        assert len(hits) == 1
        kinds.update(hits)
    assert len(kinds) > 15


@pytest.mark.parametrize(
    "augment", [{"policy": "rand-m9-mstd0.5-inc1"}, {"erasing": 1.0}, {"crop_scale": [0.3, 1.0]}]
)
def test_augmentation_is_a_function_of_its_draws(folder, augment):
    samples = LabelledSamples(open_labelled(str(folder)), config(folder, augment=augment))
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    first = samples.pixels(image, rng_for(1))
    np.random.seed(5)
    state = np.random.get_state()[1].copy()
    assert torch.equal(samples.pixels(image, rng_for(1)), first)
    assert np.array_equal(np.random.get_state()[1], state)  # the global generators are as before
    others = [samples.pixels(image, rng_for(seed)) for seed in range(2, 8)]
    assert any(not torch.equal(first, other) for other in others)
    assert torch.isfinite(torch.stack(others)).all()


def test_images_beside_class_folders_are_refused(tmp_path):
    for name in ("logo.png", "cat/1.png", "dog/1.png"):
        file = tmp_path / "set" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(file)
    with pytest.raises(ConfigError, match=r"logo\.png lies beside"):
        open_labelled(str(tmp_path))


def test_boxes_of_a_reduced_copy_are_of_its_image():
    for upright, annotated in (((640, 427), (6000, 4000)), ((6000, 4000), (640, 427))):
        assert turn_of(upright, annotated, 1) == 1  # sides are rounded to whole pixels


def coco(name):
    return {"format": "coco", "annotations": name, "images": "images"}


@pytest.mark.parametrize(
    ("config", "values", "train", "test"),
    [
        (LabelledImagesConfig, {}, "{0}", "{0}-link"),
        (LabelledImagesConfig, {}, "{0}", "{0}/shard-000000.tar"),
        (RicoScreensConfig, {"hierarchies": "", "captions": ""}, "{0}/a.txt", "{0}/b/../a.txt"),
        (DetectionDataConfig, {}, coco("a.json"), coco("./a.json")),
        (DetectionDataConfig, {}, *({"format": "scenes", "count": count} for count in (9, 3))),
        (LabelledImagesConfig, {}, "{0}", "{0}/red"),
    ],
)
def test_test_data_that_are_training_data_are_named(config, values, train, test, tmp_path):
    (tmp_path / "train-link").symlink_to(tmp_path / "train")
    (tmp_path / "train" / "red").mkdir(parents=True)
    paths = {"train": train, "test": test}
    for key, path in paths.items():
        paths[key] = path.format(tmp_path / "train") if isinstance(path, str) else path
    with pytest.warns(UserWarning, match="the test data .* are training data"):
        config.model_validate(values | paths)
    with warnings.catch_warnings(action="error"):
        other = f"{tmp_path}/training" if isinstance(test, str) else coco("b.json")
        config.model_validate(values | paths | {"test": other})


def test_other_data_in_the_training_folder_are_no_training_data(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for place in ("shards", "shards/test", "red/shards"):
        as_shards(folder, folder / place)
    inside = [(".", "red/shards"), (".", "@eaDir/red"), (".", "red/a.tar"), ("", "red"), ("", "")]
    (folder / "@eaDir" / "red").mkdir(parents=True)
    with warnings.catch_warnings(action="error"):
        for train, test in (("shards", "shards/test"), *inside):
            LabelledImagesConfig.model_validate({"train": train, "test": test})
        scenes = {"format": "scenes", "count": 2}
        DetectionDataConfig.model_validate({"train": coco("."), "test": scenes})
