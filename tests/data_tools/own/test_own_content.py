from collections import Counter

import numpy as np
import pytest
from benchmark_files import tar_of
from hypothesis import given
from hypothesis import strategies as st
from made_shards import encoded, photo
from own_forms import as_csv, as_zip, captions_of, images, pairs, rows, write
from raw_images import files_of
from test_import_forms import stored

from data_tools.__main__ import main
from data_tools.own.content import SPLITS, assign_splits
from data_tools.own.import_data import IMPORT_NAME
from vlp.data.shards.sample_files import contents
from vlp.data.shards.shard_reader import ShardIndex

HALVES = ["--split", "0.4", "0.3", "0.3"]


def test_the_bytes_decide_and_other_names_change_nothing(tmp_path, capsys):
    first = write(tmp_path / "one", pairs())
    renamed = {f"train/x{name}": data for name, data in pairs().items()}
    more = {f"more{seed}.jpg": encoded(photo(seed)) for seed in range(40, 60)}
    texts = {name.replace("jpg", "txt"): b"more" for name in more}
    second = write(tmp_path / "two", {**renamed, **more, **texts})
    found = []
    for place in (first, second):
        out = tmp_path / f"out-{place.name}"
        assert main(["import", str(place), "--out", str(out), *HALVES]) == 0
        found.append({data: split for data, (split, _) in stored(out).items()})
    assert {data: found[1][data] for data in found[0]} == found[0]
    assert set(found[0].values()) == set(SPLITS)
    assert capsys.readouterr().out.count("not used as splits: folders 'train'\n") == 1


def test_copies_stay_on_one_side_and_equal_bytes_are_one_sample(tmp_path):
    files = {}
    for seed in range(12):
        image = photo(seed, (96, 72))
        for quality in (50, 70, 95):
            files[f"{seed}-{quality}.jpg"] = encoded(image, quality=quality)
            files[f"{seed}-{quality}.txt"] = f"saved {quality}".encode()
        files[f"again{seed}.jpg"] = files[f"{seed}-50.jpg"]
        files[f"again{seed}.txt"] = b"again"
    place = write(tmp_path / "mine", files)
    assert main(["import", str(place), "--out", str(tmp_path / "out"), *HALVES]) == 0
    found = stored(tmp_path / "out")
    assert len(found) == 36
    for seed in range(12):
        sides = {found[files[f"{seed}-{quality}.jpg"]][0] for quality in (50, 70, 95)}
        assert len(sides) == 1
        assert found[files[f"{seed}-50.jpg"]][1].captions == ["saved 50", "again"]
    assert len({split for split, _ in found.values()}) == 3


@pytest.mark.parametrize("column", ["Data Split", "Usage", "set_name"])
def test_given_splits_are_kept_and_no_image_is_on_two_sides(column, tmp_path):
    names = ["training", "dev", "TEST"]
    table = [{**row, column: names[row["number"] % 3]} for row in rows()]
    table += [{**table[0], column: "TEST", "caption": "seen twice"}]
    place = write(tmp_path / "mine", {**images(), "table.csv": as_csv(table)})
    assert main(["import", str(place), "--out", str(tmp_path / "out")]) == 0
    found = stored(tmp_path / "out")
    for number, (name, data) in enumerate(images().items()):
        split, annotation = found[data]
        assert split == ("test" if number == 0 else SPLITS[number % 3])
        extra = ["seen twice"] if number == 0 else []
        assert annotation.captions == [*captions_of(name), *extra]


def _in_parts(parts):
    texts = {f"{name.rpartition('.')[0]}.txt": b"a dog" for name in images()}
    return {
        f"{parts[int(name.split()[1][:2]) % len(parts)]}/{name}": data
        for name, data in {**images(), **texts}.items()
    }


@pytest.mark.parametrize(
    ("by", "parts", "splits"),
    [
        ("folders", ["train", "extra", "test", "train"], "train and test"),
        ("column", ["train", "extra", "test", "train"], "train and test"),
        ("column", ["train", "extra", "train", "train"], "train"),
    ],
)
def test_a_name_of_no_split_beside_splits_is_refused(by, parts, splits, tmp_path, capsys):
    """Else all images would be dealt anew, those of test into train."""
    if by == "folders":
        place = write(tmp_path / "mine", _in_parts(parts))
    else:
        table = [{**row, "split": parts[row["number"] % 4]} for row in rows()]
        place = write(tmp_path / "mine", {**images(), "table.csv": as_csv(table)})
    assert main(["import", str(place), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"'extra' (4 images) is not a split, but there are {splits}" in said


@pytest.mark.parametrize("by", ["folders", "column"])
def test_images_without_a_split_beside_others_go_into_train(by, tmp_path, capsys):
    if by == "folders":
        files = _in_parts(["val", "test", "."])
        place = write(tmp_path / "mine", files)
    else:
        table = [{**row, "split": ("val", "test", " ")[row["number"] % 3]} for row in rows()]
        place = write(tmp_path / "mine", {**images(), "table.csv": as_csv(table)})
    out = tmp_path / "out"
    assert main(["import", str(place), "--out", str(out), "--split", "0.1", "0.4", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "split as in the data: val 6, train 5, test 5" in printed
    found = stored(out)
    sides = [found[data][0] for data in images().values()]
    assert sides == [("val", "test", "train")[number % 3] for number in range(16)]


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("folders", ["train2017", "val2017"]),
        ("folders", ["cats/train", "cats/valid"]),
        ("folders", ["trainA", "split=dev"]),
        ("folders", ["TrainingData", "evaluation"]),
        ("folders", ["trn", "validate"]),
        ("folders", ["[train]imgs", "x—development"]),
        ("folders", ["train+restval", "minival2014"]),
        ("tars", ["cc3m-train-0000", "cc3m-validation-0000"]),
        ("zips", ["train", "val"]),
        ("files", ["COCO_train2014", "COCO_val2014"]),
        ("table", ["train", "val"]),
        ("places", ["train", "val"]),
        ("tables", ["captions_train2017", "captions_val2017"]),
    ],
)
def test_a_split_that_names_tell_is_kept(form, names, tmp_path):
    place, more = tmp_path / "mine", []
    for part, name in enumerate(names):
        files = {f"{n:05}.jpg": encoded(photo(n)) for n in range(6 * part, 6 * part + 6)}
        texts = {f"{stem[:-4]}.txt": f"{part}".encode() for stem in files}
        if form == "tars":
            place.mkdir(exist_ok=True)
            tar_of(place / f"{name}.tar", files | texts)
        elif form == "zips":
            place.mkdir(exist_ok=True)
            as_zip(place / f"{name}.zip", files | texts)
        elif form == "tables":
            rows = [{"image": image, "caption": str(part)} for image in files]
            write(place, {**files, f"{name}.csv": as_csv(rows)})
        elif form in ("folders", "files"):
            mark = "/" if form == "folders" else "_"
            write(place, {f"{name}{mark}{one}": data for one, data in (files | texts).items()})
        else:
            write(tmp_path / "data" / name, files)
            more.append(str(tmp_path / "data" / name))
    if form in ("table", "places"):
        rows = [{"image": f"{names[n // 6]}/{n:05}.jpg", "caption": str(n // 6)} for n in range(12)]
        place = write(place, {"all.csv": as_csv(rows)}) / "all.csv"
        more = ["--images", *(more if form == "places" else [str(tmp_path / "data")])]
    out = tmp_path / "out"
    assert main(["import", str(place), *more, "--out", str(out), "--processes", "1"]) == 0
    sides = sorted((split, about.captions) for split, about in stored(out).values())
    assert sides == [("train", ["0"])] * 6 + [("val", ["1"])] * 6


def test_images_that_are_nowhere_fill_no_split(tmp_path):
    files = {f"{n}.jpg": encoded(photo(n)) for n in range(6)}
    lines = [f"{n}.jpg,picture {n}" for n in range(6)] + [f"gone{n}.jpg,gone" for n in range(5)]
    table = "\n".join(["image,caption", *lines]).encode()
    place = write(tmp_path / "mine", {**files, "all.csv": table})
    assert main(["import", str(place), "--out", str(tmp_path / "out"), "--processes", "1"]) == 0
    sides = Counter(split for split, _ in stored(tmp_path / "out").values())
    assert sides == {"train": 4, "val": 1, "test": 1}


@given(
    groups=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    shares=st.sampled_from([(0.9, 0.05, 0.05), (0.5, 0.25, 0.25), (0.8, 0.2, 0.0), (1.0, 0, 0)]),
    seed=st.integers(0, 2**32),
    said=st.lists(st.sampled_from([None, None, None, *SPLITS]), min_size=60, max_size=60),
)
def test_no_group_is_torn(groups, shares, seed, said):
    rng = np.random.default_rng(seed)
    numbers = np.unique(groups, return_inverse=True)[1].astype(np.int64)
    digests = rng.integers(0, 2**64, len(groups), dtype=np.uint64)
    splits = assign_splits(numbers, digests, [None] * len(groups), shares)
    by_group = dict(zip(numbers.tolist(), splits))
    assert splits == [by_group[group] for group in numbers.tolist()]
    wanted = {name for name, share in zip(SPLITS, shares) if share}
    assert set(splits) <= wanted
    assert len(set(splits)) == min(len(wanted), len(by_group))
    kept = assign_splits(numbers, digests, said[: len(groups)], shares)
    for split, wish in zip(kept, said):
        assert wish in (None, split)


def test_shares_are_met_and_images_stay_when_others_come():
    digests = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    groups = np.arange(20_000)
    splits = assign_splits(groups, digests, [None] * 20_000, (0.9, 0.05, 0.05))
    counts = Counter(splits)
    assert abs(counts["val"] / 20_000 - 0.05) < 0.005
    assert abs(counts["test"] / 20_000 - 0.05) < 0.005
    fewer = assign_splits(groups[:5000], digests[:5000], [None] * 5000, (0.9, 0.05, 0.05))
    assert fewer == splits[:5000]


def test_a_split_that_is_refused_leaves_the_others_as_they_were(tmp_path, capsys):
    place = write(tmp_path / "mine", _in_parts(["val", "test"]))
    command = ["import", str(place), "--out", str(tmp_path / "out"), "--processes", "1"]
    assert main(command) == 0
    before = files_of(tmp_path / "out")
    (place / "val/photo 00.txt").write_bytes(b"a cat")
    (place / "test").rename(place / "train")
    assert main(command) == 2
    assert "test/shard-000000.tar: a shard of a longer list" in capsys.readouterr().err
    assert files_of(tmp_path / "out") == before
    assert not (tmp_path / "out/train").exists()
    (place / "train").rename(place / "test")
    assert main(command) == 0
    captions = [annotation.captions for _, annotation in stored(tmp_path / "out").values()]
    assert captions.count(["a cat"]) == 1


def pictures(numbers, folder=""):
    files = {}
    for number in numbers:
        files[f"{folder}{number:03d}.jpg"] = encoded(photo(number))
        files[f"{folder}{number:03d}.txt"] = f"picture {number}".encode()
    return files


def imported(place, *options):
    shares = ("--split", "0.5", "0.3", "0.2", "--samples-per-shard", "8")
    return main(["import", str(place), "--out", str(place.parent / "out"), *shares, *options])


def shards(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.tar")}


def sides(out):
    return {
        sample.key: split
        for split in SPLITS
        for tar in sorted((out / split).glob("*.tar"))
        for sample in contents(tar).samples
    }


def test_images_sorted_before_and_between_follow_those_of_before(tmp_path, capsys):
    place, out = write(tmp_path / "mine", pictures(range(10, 60, 2), "b/")), tmp_path / "out"
    assert imported(place) == 0
    before, where = shards(out), sides(out)
    assert set(where) == {f"{number:03d}" for number in range(10, 60, 2)}
    # Sorted in between, and in a folder that shares no part of the path.
    write(place, pictures(range(11, 40, 2), "b/") | pictures(range(70, 90), "a/"))
    assert imported(place) == 0
    assert "35 images are new" in capsys.readouterr().out
    after = sides(out)
    assert len(after) == 60
    assert before.items() <= shards(out).items()
    assert where.items() <= after.items()
    assert {"b_011", "a_070"} <= set(after)
    for split in SPLITS:
        assert ShardIndex.open(out / split).shards.total == list(after.values()).count(split)
    grown = shards(out)
    assert imported(place) == 0  # once more: nothing is new
    assert "images are new" not in capsys.readouterr().out
    assert shards(out) == grown


def test_an_image_like_an_earlier_one_goes_to_its_side(tmp_path):
    place, out = write(tmp_path / "mine", pictures(range(40))), tmp_path / "out"
    assert imported(place) == 0
    where = sides(out)
    files = {}
    for number in range(40):  # the same pictures in another quality
        files[f"0{number:03d}.jpg"] = encoded(photo(number), quality=60)
        files[f"0{number:03d}.txt"] = b"again"
    write(place, files)
    assert imported(place) == 0
    after = sides(out)
    assert len(after) == 80
    assert all(after[f"0{key}"] == split for key, split in where.items())


def test_a_growth_that_is_refused_is_not_remembered(tmp_path, capsys):
    place, out = write(tmp_path / "mine", pictures(range(20))), tmp_path / "out"
    assert imported(place) == 0
    before = (out / IMPORT_NAME).read_bytes()
    for path in place.glob("003.*"):
        path.unlink()
    write(place, pictures(range(100, 110)))
    assert imported(place) == 2
    assert "holds 003, one of 1 samples" in capsys.readouterr().err
    assert (out / IMPORT_NAME).read_bytes() == before
    assert imported(place, "--replace") == 0
    assert len(sides(out)) == 29
    assert len((out / IMPORT_NAME).read_text().splitlines()) == 29
