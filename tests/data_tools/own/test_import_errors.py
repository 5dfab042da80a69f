import gzip
import io
import json
import os
import zipfile

import numpy as np
import own_forms
import pytest
from benchmark_files import tar_of
from made_shards import encoded, photo
from mutations import mutated
from own_forms import as_csv, as_lines, as_zip, images, pairs, rows, write

from data_tools.__main__ import main
from vlp.data.shards.shard_reader import ShardIndex


@pytest.fixture
def refused(tmp_path, capsys):

    def say(*arguments):
        out = tmp_path / "out"
        command = ["import", *map(str, arguments), "--out", str(out), "--processes", "1"]
        assert main(command) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("vlp data import: ")
        assert not out.exists()
        return said

    return say


def test_nothing_that_is_known(tmp_path, refused):
    assert "there is no such file or folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds nothing; it should be images with NAME.txt" in refused(tmp_path / "empty")
    place = write(tmp_path / "films", {"a.mp4": b"x", "b.mp4": b"x", "c.pdf": b"x"})
    assert "holds 2 .mp4, 1 .pdf; it should be" in refused(place)
    place = write(tmp_path / "sheets", {"a.xlsx": b"x"})
    assert "save a spreadsheet as CSV" in refused(place)


def test_captions_are_printed_on_a_terminal_without_their_letters(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    place = write(tmp_path / "mine", {**pairs(), "photo 00.txt": "\u65e5".encode()})
    assert main(["import", str(place), "--out", str(tmp_path / "out")]) == 0


def test_out_is_the_place(tmp_path, capsys):
    place = write(tmp_path / "mine", pairs())
    assert main(["import", str(place), "--out", str(place)]) == 2
    assert "is the folder of the images; choose another" in capsys.readouterr().err
    assert main(["import", str(place), "--out", str(place / "shards")]) == 0
    assert main(["import", str(place), "--out", str(place / "shards")]) == 0


def test_a_list_that_does_not_fit_the_shards_leaves_nothing(tmp_path, capsys):
    write(tmp_path / "images", images())
    for title, splits, code in (("one", ["val"] * 12, 0), ("two", ["train", "val"] * 6, 2)):
        table = [{"file": n, "caption": "a dog", "split": s} for n, s in zip(images(), splits)]
        (tmp_path / f"{title}.csv").write_bytes(as_csv(table))
        command = ["import", str(tmp_path / f"{title}.csv"), "--images", str(tmp_path / "images")]
        out = ["--out", str(tmp_path / "out"), "--split-column", "split", "--image", "file"]
        assert main([*command, *out]) == code, capsys.readouterr()
    assert "out/val was begun with name one, this command says two" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"imported.jsonl", "val"}


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_columns_that_are_not_known(suffix, tmp_path, refused):
    table = [{"which": name, "what": "a dog"} for name in images()]
    path = tmp_path / f"table.{suffix}"
    path.write_bytes(as_csv(table) if suffix == "csv" else as_lines(table))
    wrong = ["--caption", "waht", "column 'waht'"]
    for *options, kind in ["columns of images"], ["--image", "which", "column of captions"], wrong:
        assert f"no {kind}" in refused(path, *options)
    table = [
        {"image": f"{n}.jpg", "caption": "a"} | ({"split": "test"} if n == 60 else {})
        for n in range(70)
    ]
    write(tmp_path, {"late.jsonl": as_lines(table)})
    assert "late.jsonl, line 61: the first 50 rows have no" in refused(tmp_path / "late.jsonl")


def test_images_that_are_elsewhere(tmp_path, refused):
    table = write(tmp_path, {"table.csv": as_csv(rows())}) / "table.csv"
    said = refused(table)
    expected = "16 of 16 images are missing (first: photo 00.jpg); name their"
    assert expected in said
    links = [{**row, "image": f"https://x.org/{row['image']}"} for row in rows()]
    write(tmp_path, {"table.csv": as_csv(links)})
    assert "download the URLs with img2dataset" in refused(table)
    some = write(tmp_path / "some", dict(list(images().items())[:6]))
    table = write(tmp_path, {"table.csv": as_csv(rows())}) / "table.csv"
    said = refused(table, "--images", some)
    assert "10 of 16 images are missing (first: photo 06.jpg); name their" in said
    command = ["import", str(table), "--images", str(some), "--out", str(tmp_path / "out")]
    assert main([*command, "--allow-missing-images"]) == 0
    counted = [json.loads(path.read_text()) for path in tmp_path.rglob("manifest.json")]
    assert sum(manifest["samples"] for manifest in counted) == 6


def test_images_that_come_later_stay_on_their_side(tmp_path, capsys):
    """A missing image is dealt by its name, and by its bytes it would often go elsewhere."""
    photos = tmp_path / "photos"
    write(photos, {f"{n}.jpg": encoded(photo(n)) for n in range(0, 40, 2)})
    lines = [f"{n}.jpg,picture {n}" for n in range(40)]
    table = write(tmp_path, {"table.csv": "\n".join(["image,caption", *lines]).encode()})
    command = ["import", str(table / "table.csv"), "--images", str(photos)]
    command += ["--out", str(tmp_path / "out"), "--split", "0.4", "0.3", "0.3"]
    assert main(command) == 0
    for tried in (range(1, 40, 4), range(3, 40, 4), range(1)):
        write(photos, {f"{n}.jpg": encoded(photo(n)) for n in tried})
        assert main([*command, "--retry"]) == 0
    assert main([*command, "--name", "other"]) == 2
    assert "choose another --out, pass --name table, or" in capsys.readouterr().err
    found = [ShardIndex.open(tmp_path / "out" / split) for split in ("train", "val", "test")]
    assert sum(index.shards.total for index in found) == 40


def test_damaged_files(tmp_path, refused):
    packed = gzip.compress(tar_of(tmp_path / "a.tar", pairs()).read_bytes())
    cut = {"cut.tar.gz": packed[: len(packed) // 2], "no.zip": b"PK\x03\x04 no zip"}
    write(tmp_path, cut | {"no.parquet": b"PAR1 no", "no.arrow": b"no", "no.csv": b"a\xff\xfe,b\n"})
    assert "a damaged archive" in refused(tmp_path / "cut.tar.gz")
    assert "no.zip: " in refused(tmp_path / "no.zip")
    assert "not a readable parquet file" in refused(tmp_path / "no.parquet")
    assert "not a readable arrow file" in refused(tmp_path / "no.arrow")
    assert "not UTF-8" in refused(tmp_path / "no.csv")
    long_cell = b'image,caption\na.jpg,"never closed' + b"x" * 200_000
    write(tmp_path, {"open.csv": long_cell, "coco.json": b'{"images": [], "annotations": []}'})
    assert "quote left open" in refused(tmp_path / "open.csv")
    assert "take it with: vlp data coco --annotations FILE" in refused(tmp_path / "coco.json")


def test_faults_in_archives_name_the_archive_and_the_member(tmp_path, capsys):
    lines = as_lines(rows()) + b"broken\n"
    listed = json.dumps({"rows": [*rows(), None]}).encode()
    set_files = {f"set/{name}": data for name, data in images().items()}
    first = tar_of(tmp_path / "a.tar.gz", {**set_files, "set/all.jsonl": lines}, "w:gz")
    second = as_zip(tmp_path / "b.zip", {**set_files, "set/all.json": listed})
    for path, where in ((first, "all.jsonl, line 23"), (second, "all.json, rows, row 23")):
        assert main(["import", str(path), "--out", str(tmp_path / "out"), "--replace"]) == 0
        assert f"(first: {path}: set/{where})" in capsys.readouterr().out


def test_hostile_archives(tmp_path, refused):
    write(tmp_path, {"bomb.tar.gz": gzip.compress(bytes(2**27))})
    assert "unpacks to more than 100 times" in refused(tmp_path / "bomb.tar.gz")
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jpg", images()["photo 00.jpg"])
        archive.writestr("table.csv", bytes(2**27))
    write(tmp_path, {"bomb.zip": stream.getvalue()})
    assert "unpacks to more than 100 times" in refused(tmp_path / "bomb.zip")


def test_names_that_lead_out_of_an_archive(tmp_path):
    write(tmp_path, {"secret.jpg": encoded(photo(99))})
    led = [{**rows()[0], "image": name} for name in ("../secret.jpg", f"{tmp_path}/secret.jpg")]
    files = {f"../../{name}": data for name, data in images().items()}
    place = as_zip(tmp_path / "set.zip", {**files, "../table.csv": as_csv([*rows(), *led])})
    assert main(["import", str(place), "--out", str(tmp_path / "deep/out")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"secret.jpg", "set.zip", "deep"}
    counted = [json.loads(path.read_text()) for path in tmp_path.rglob("manifest.json")]
    assert sum(manifest["samples"] for manifest in counted) == 16
    missing = [one["failures"].get("missing image", {"count": 0}) for one in counted]
    assert sum(one["count"] for one in missing) == 2


def test_broken_images_are_counted_and_named(tmp_path, capsys):
    files = {**pairs(), "cut.jpg": encoded(photo(50))[:400], "cut.txt": b"cut",
             "text.png": b"no image", "text.txt": b"text", "a.tif": b"II*\0", "a.txt": b"a",
             "wide.png": encoded(photo(51).resize((3000, 2)), "png"), "wide.txt": b"w"}  # fmt: skip
    place = write(tmp_path / "mine", files)
    assert main(["import", str(place), "--out", str(tmp_path / "out")]) == 0
    counted = [json.loads(path.read_text()) for path in tmp_path.rglob("manifest.json")]
    failed = {kind: ids["ids"] for one in counted for kind, ids in one["failures"].items()}
    assert {kind: set(ids) for kind, ids in failed.items()} == {
        "unreadable image": {"cut", "text", "a"},
        "image too large": {"wide"},
    }
    assert "1 images are of formats that are not read (1 .tif)" in capsys.readouterr().out


def test_rows_of_a_table_that_lead_out_of_its_folder_are_counted_and_not_read(tmp_path):
    """A stranger's table would otherwise bring private images into shards that are shared."""
    named = rows()
    private = write(tmp_path / "private", {"me.jpg": images()[named[0]["image"]]}) / "me.jpg"
    named[0]["image"], named[1]["image"] = str(private), "../private/me.jpg"
    named[2]["image"] = f"{tmp_path / 'mine'}/{named[2]['image']}"  # absolute, and its own
    place = write(tmp_path / "mine", {**images(), "table.csv": as_csv(named)})
    out = tmp_path / "out"
    command = ["import", str(place / "table.csv"), "--out", str(out), "--split", "1", "0", "0"]
    assert main(command) == 0
    manifest = json.loads((out / "train" / "manifest.json").read_text())
    assert manifest["samples"] == len(images()) - 1  # the first two rows are of one image
    [(kind, failed)] = manifest["failures"].items()
    assert kind.startswith("image outside the folder of its table")
    assert failed["count"] == 2
    assert any("../private/me.jpg" in place for place in failed["ids"])


# VLP_FUZZ_IMPORT says how many.
TRIES = int(os.environ.get("VLP_FUZZ_IMPORT", "6"))
MUTATED = [
    *(own_forms.folder, own_forms.imagefolder_jsonl, own_forms.csv_file, own_forms.json_rows),
    *(own_forms.parquet_structs, own_forms.saved, own_forms.tar_gz, own_forms.zip_of_imagefolder),
    *(own_forms.unsorted_tar, own_forms.karpathy),
]


@pytest.mark.parametrize("form", MUTATED, ids=lambda form: form.__name__)
def test_mutated_files(form, tmp_path, capsys):
    place = form(tmp_path)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    tables = [path for path in files if path.suffix not in (".jpg", ".png", ".webp")] or files
    for number in range(TRIES):
        rng = np.random.default_rng((number, len(form.__name__)))
        path = tables[int(rng.integers(len(tables)))]
        before = path.read_bytes()
        if not before:
            continue
        other = files[int(rng.integers(len(files)))].read_bytes()
        path.write_bytes(mutated(rng, path.name, before, other))
        out = tmp_path / f"out-{number}"
        code = main(["import", *place, "--out", str(out), "--processes", "1"])
        said = capsys.readouterr().err.strip().splitlines()
        assert code in (0, 1, 2)
        assert code != 2 or said[-1].startswith("vlp data import: ")
        path.write_bytes(before)
