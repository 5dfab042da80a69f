import json
import os
from pathlib import Path

import pytest
from benchmark_files import tar_of
from made_shards import encoded, photo, run
from own_forms import (
    COUNT,
    FORMS,
    as_csv,
    as_lines,
    as_parquet,
    captions_of,
    images,
    karpathy,
    rows,
    structs,
    write,
)
from raw_images import files_of
from readers import slots

from data_tools.__main__ import main
from data_tools.own import forms
from data_tools.own.content import SPLITS
from data_tools.own.tables import texts_in
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.shards.tar import escape_name


def stored(out):
    found = {}
    for split in SPLITS:
        if not (out / split / "index.npz").exists():
            continue
        index = ShardIndex.open(out / split)
        for shard, entry in enumerate(index.shards):
            for number in range(entry.samples):
                sample = index.read(shard, number)
                assert sample.image not in found
                found[sample.image] = (split, sample.annotation)
    return found


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_to_shards_and_training(form, tmp_path, capsys):
    out = tmp_path / "shards" / "mine"
    options = ["--name", "my photos", "--license", "CC0", "--processes", "1"]
    assert main(["import", *form(tmp_path), "--out", str(out), *options]) == 0
    printed = capsys.readouterr().out

    found = stored(out)
    assert {data: annotation.captions for data, (_, annotation) in found.items()} == {
        data: captions_of(name) for name, data in images().items()
    }
    assert {annotation.source for _, annotation in found.values()} == {"my photos"}
    assert len({annotation.image_id for _, annotation in found.values()}) == COUNT
    for split in SPLITS:
        if (out / split).exists():
            manifest = json.loads((out / split / "manifest.json").read_text())
            assert manifest["title"] == f"my photos, {split}"
            assert manifest["licence"] == "CC0"
            assert manifest["failures"] == {}
    assert f"{COUNT} images, {sum(len(captions_of(name)) for name in images())} captions" in printed
    assert printed.count("48 x 32: ") == 3

    valid = [valid for _, valid in slots(out / "train")]
    assert valid == [True] * [split for split, _ in found.values()].count("train")


def imported_annotations(place, *options):
    out = place.parent / "out"
    assert run("import", place, "--out", out, "--split", 1, 0, 0, *options) == 0
    index = ShardIndex.open(out / "train")
    samples = [index.read(0, number) for number in range(index.shards.total)]
    return {sample.key: sample.annotation for sample in samples}


def imported(place, *options):
    return [about.captions or [] for about in imported_annotations(place, *options).values()]


@pytest.mark.parametrize(
    ("written", "texts"),
    [
        ("['A dog\\'s.' \"Two 'dogs'.\"\n 'three']", ["A dog's.", "Two 'dogs'.", "three"]),
        ("('a', 'b')", ["a", "b"]),
        ("[array(['a'], dtype=object), list(['b'])]", ["a", "b"]),
        ("[np.str_('a') np.str_('b')]", ["a", "b"]),
        ("[b'a', u'b']", ["a", "b"]),
        ("[None, nan, 'a' nan]", ["a"]),
        ("{'b', 'a'}", ["b", "a"]),
        ("{'caption': 'a'}", ["a"]),
        ("[{'raw': 'a'} {'raw': 'b'}]", ["a", "b"]),
        ("[['a' 'b']\n ['c' None]]", ["a", "b", "c"]),
        ('["a", null]', ["a"]),
        ('("sold out")', ['("sold out")']),
        ("[a dog] runs", ["[a dog] runs"]),
        ("['never closed", ["['never closed"]),
    ],
)
def test_a_list_that_was_printed_is_its_captions(written, texts):
    assert texts_in(written) == texts


@pytest.mark.parametrize("kind", ["parquet", "saved", "hub"])
def test_numbers_of_classes_are_their_names(tmp_path, kind):
    import datasets

    names = datasets.ClassLabel(names=["cat", "dog"])
    table = datasets.Dataset.from_list(
        [
            {"image": {"bytes": data, "path": name}, "what": n % 2, "more": [n % 2, 1 - n % 2]}
            for n, (name, data) in enumerate(images().items())
        ]
    )
    table = table.cast_column("image", datasets.Image(decode=False)).cast_column("what", names)
    table = table.cast_column("more", datasets.Sequence(names))
    if kind == "saved":
        table.save_to_disk(tmp_path / "set")
    else:
        (tmp_path / "set").mkdir()
        table.to_parquet(tmp_path / "set" / "train.parquet")
    place = Path(f"hub:{tmp_path / 'set'}") if kind == "hub" else tmp_path / "set"
    for column, texts in (("what", [["cat"], ["dog"]]), ("more", [["cat", "dog"], ["dog", "cat"]])):
        out = tmp_path / column
        command = ["import", str(place), "--caption", column, "--out", str(out)]
        assert main([*command, "--processes", "1", "--split", "1", "0", "0"]) == 0
        index = ShardIndex.open(out / "train")
        found = [index.read(0, number).annotation.captions for number in range(COUNT)]
        assert found == texts * (COUNT // 2)


def test_captions_of_the_json_come_before_those_of_the_text(tmp_path):
    """Training on the same files reads the text only where the JSON has no caption."""
    about = [
        {"caption": "of the JSON"},
        {"caption": "one", "captions": ["several", "of the JSON"]},
        {"title": "IMG_2", "caption": ""},
        {"title": "of nothing else"},
    ]
    files = {}
    for number, content in enumerate(about):
        files[f"{number}.jpg"] = encoded(photo(number))
        files[f"{number}.json"] = json.dumps(content).encode()
        files[f"{number}.txt"] = b"of the text" if number < 3 else b""
    assert imported(write(tmp_path / "mine", files)) == [
        ["of the JSON"],
        ["several", "of the JSON"],
        ["of the text"],
        ["of nothing else"],
    ]


def test_a_caption_ends_where_its_line_does(tmp_path):
    texts = ["a dog\u2028on grass\r\ntwo dogs\rthree\r\n", "one\x85caption\x0bmore"]
    files = {}
    for number, text in enumerate(texts):
        files[f"{number}.jpg"] = encoded(photo(number))
        files[f"{number}.txt"] = text.encode()
    assert imported(write(tmp_path / "mine", files)) == [
        ["a dog on grass", "two dogs", "three"],
        ["one caption more"],
    ]


@pytest.mark.parametrize(
    ("name", "text", "first"),
    [
        ("same names.csv", "image,caption,caption\n0.jpg,a,b\n1.jpg,c,\n", ["a", "b"]),
        ("of pandas.csv", "image,caption,caption.1\n0.jpg,a,b\n1.jpg,c,\n", ["a", "b"]),
        ("escaped.csv", 'image,caption\n0.jpg,"a \\"big\\", dog"\n1.jpg,c\n', ['a "big", dog']),
        ("quoted.tsv", '"image"\t"caption"\n"0.jpg"\t"it says ""a"""\n', ['it says "a"']),
        ("open quote.tsv", 'image\tcaption\n0.jpg\t"a\n1.jpg\tc"\n', ['"a']),
        (
            "signs.token",
            '0.jpg#0\t"Out" it says\n0.jpg#1\ta 5" cake\n1.jpg#0\t"c\n',
            ['"Out" it says', 'a 5" cake'],
        ),
        ("open quote.csv", 'image,caption\n0.jpg,z\n0.jpg,"a\n1.jpg,c\n0.jpg,"b"\n', ["z", "b"]),
        ("nulls.csv", "image,text_1,text_2\n0.jpg,a,NULL\n1.jpg,\\N,c\n0.jpg,#NAME?,n/a\n", ["a"]),
        (
            "number sign.csv",
            "image,caption\n0.jpg#0,a\n1.jpg,c\n0.jpg#1,b\n0#1.jpg,x\n",
            ["a", "b"],
        ),
        ("a/parent.csv", "image,caption\n../0.jpg,a\n../1.jpg,c\n", ["a"]),
    ],
)
def test_a_cell_is_a_caption_of_the_image_that_its_row_names(name, text, first, tmp_path):
    files = {f"{folder}{n}.jpg": encoded(photo(n)) for folder in ("", "b/") for n in range(2)}
    write(tmp_path / "mine", {**files, name: text.encode()})
    assert imported(tmp_path / "mine", "--allow-missing-captions")[0] == first


@pytest.mark.parametrize("beside", ["other captions", "boxes"])
def test_a_table_comes_before_files_without_its_columns_or_with_numbers(beside, tmp_path):
    table = as_csv([{"image": f"{number}.jpg", "alt": f"table {number}"} for number in range(8)])
    files = {"table.csv": table}
    for number in range(8):
        files[f"{number}.jpg"] = encoded(photo(number))
        files[f"{number}.txt"] = b"0 0.5 0.5 1e-1 0.25\n1 0 0 1 1\n"
        if beside == "other captions":
            about = {"alt": f"alt {number}", "caption": "no"}
            files[f"{number}.json"] = json.dumps(about).encode()
    place = write(tmp_path / "mine", files)
    options = ("--caption", "alt") if beside == "other captions" else ()
    assert imported(place, *options) == [[f"table {number}"] for number in range(8)]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("0.json", b'{"caption": "cut off', "Unterminated string"),
        ("0.json", b'{"caption": "\xe9"}', "not UTF-8"),
        ("0.txt", b"caf\xe9", "not UTF-8"),
    ],
)
def test_an_annotation_that_cannot_be_read_costs_its_image(name, data, reason, tmp_path, capsys):
    files = {f"{number}.jpg": encoded(photo(number)) for number in range(3)}
    files |= {f"{number}.txt": b"a dog" for number in (1, 2)} | {name: data}
    place = write(tmp_path / "mine", files)
    assert imported(place) == [["a dog"], ["a dog"]]
    said = capsys.readouterr().out
    assert "3 images, and 1 of them have no caption (first: 0.jpg): left out" in said
    assert f"bad annotation: 1 (first: {name}: {reason}" in said
    (place / "1.txt").unlink()
    assert main(["import", str(place), "--out", str(tmp_path / "again")]) == 2
    said = capsys.readouterr().err
    assert "2 of them have no caption (first: 0.jpg)" in said
    assert f"; 1 annotations cannot be read (first: {name}: {reason}" in said


@pytest.mark.parametrize("name", ["all.csv", "all.json", "all.jsonl"])
def test_a_byte_that_is_no_text_costs_its_row(name, tmp_path, capsys):
    table = [{"image": f"{number}.jpg", "caption": f"caf\u00e9 {number}"} for number in range(3)]
    text = as_csv(table) if name.endswith("csv") else as_lines(table)
    if name == "all.json":
        text = json.dumps(table, ensure_ascii=False).encode()
    elif name == "all.jsonl":
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in table).encode()
    files = {f"{number}.jpg": encoded(photo(number)) for number in range(3)}
    bad = text.replace("caf\u00e9 1".encode(), b"caf\xe9 1")
    place = write(tmp_path / "mine", {**files, name: bad})
    assert imported(place) == [["caf\u00e9 0"], ["caf\u00e9 2"]]
    kinds = {
        "csv": "line that is not UTF-8: 1 (first: all.csv, line 3)",
        "jsonl": "line that is not",
    }
    assert kinds.get(name.partition(".")[2], "") in capsys.readouterr().out


@pytest.mark.parametrize("named", ["photo", "photos/photo"])
@pytest.mark.parametrize("where", ["inside", "around", "archive", "twice"])
def test_images_of_a_table(where, named, tmp_path, capsys):
    table = [{**row, "image": row["image"].replace("photo", named)} for row in rows()]
    files = {"table.csv": as_csv(table)}
    place = tmp_path / "set"
    photos = {f"photos/{name}": data for name, data in images().items()}
    if where == "archive":
        write(place, files)
        inside = tar_of(place / "set.tar", photos)
    else:
        write(place, files | photos)
        inside = {"inside": place / "photos", "around": tmp_path, "twice": place}[where]
    command = ("import", place, "--name", "mine", "--out")
    assert run(*command, tmp_path / "plain" / ".shards") == 0
    assert run(*command, tmp_path / "out" / ".shards", "--images", inside) == 0
    assert capsys.readouterr().out.count("  16 images, 22 captions") == 2
    assert files_of(tmp_path / "out") == files_of(tmp_path / "plain")


def test_a_name_that_two_folders_have_is_of_the_named_one(tmp_path, capsys):
    others = {f"b/{name}": data for name, data in images().items()}
    files = {f"a/{name}": data for name, data in images().items()} | others
    place = write(tmp_path / "set", {**files, "table.csv": as_csv(rows())})
    more = ("--images", place / "a", "--allow-missing-captions")
    assert run("import", place, "--out", tmp_path / "out", *more) == 0
    said = "32 images, and 16 of them have no caption (first: b/photo 00.jpg): left out"
    assert said in capsys.readouterr().out


def test_a_table_beside_images_names_these_alone(tmp_path, capsys):
    """Else the caption of a missing image goes to another one with the same base name."""
    files = {f"{part}/{n}.jpg": encoded(photo(n + 9 * (part == "test"))) for part in SPLITS[::2]
             for n in range(5)}  # fmt: skip
    table = as_csv([{"image": f"{n}.jpg", "caption": f"of test {n}", "by": "x"} for n in range(5)])
    files |= {"test/metadata.csv": table, "train/metadata.csv": table.replace(b"test", b"train")}
    del files["test/3.jpg"]
    place = write(tmp_path / "mine", files)
    assert run("import", place, "--out", tmp_path / "out") == 0
    assert "captions from 'caption'; not used: 'by'\n" in capsys.readouterr().out
    found = stored(tmp_path / "out")
    assert {(split, *about.captions) for split, about in found.values()} == {
        *(("train", f"of train {n}") for n in range(5)),
        *(("test", f"of test {n}") for n in (0, 1, 2, 4)),
    }


def test_captions_stored_as_bytes(tmp_path, capsys):
    texts = ["a caf\u00e9".encode(), b"a caf\xe9", b"a dog"]
    table = [{"image": f"{number}.jpg", "caption": text} for number, text in enumerate(texts)]
    place = write(tmp_path / "mine", {f"{n}.jpg": encoded(photo(n)) for n in range(3)})
    as_parquet(place / "table.parquet", table)
    assert imported(place, "--allow-missing-captions") == [["a caf\u00e9"], ["a dog"]]
    fault = "caption that is not UTF-8: 1 (first: table.parquet, row 2"
    assert fault in capsys.readouterr().out


def test_tables_beside_karpathys_json_are_named(tmp_path, capsys):
    karpathy(tmp_path)
    (tmp_path / "dataset_second.json").write_bytes((tmp_path / "dataset_own.json").read_bytes())
    assert main(["import", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "1 other tables are left out: dataset_second.json" in capsys.readouterr().out


def test_signs_that_are_not_seen_are_replaced_in_keys(tmp_path):
    names = ["a\u200db", "a\u200cb", "c\x07d", "\U0001f469\u200d\U0001f373"]
    files = {}
    for number, name in enumerate(names):
        files[f"{name}.jpg"] = encoded(photo(number))
        files[f"{name}.txt"] = f"picture {number}".encode()
    found = imported_annotations(write(tmp_path / "mine", files))
    assert {key: annotation.captions for key, annotation in found.items()} == {
        "a_b-2": ["picture 0"],
        "a_b-1": ["picture 1"],
        "c_d": ["picture 2"],
        "\U0001f469_\U0001f373": ["picture 3"],
    }


def test_names_that_are_not_utf_8(tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    for number in range(2):
        name = os.fsencode(folder / f"caf{number}") + b"\xe9"
        try:
            Path(os.fsdecode(name + b".jpg")).write_bytes(encoded(photo(number)))
        except OSError:
            pytest.skip("this file system takes names in UTF-8 only")
        Path(os.fsdecode(name + b".txt")).write_text(f"picture {number}")
    found = imported_annotations(folder)
    assert {key: annotation.captions for key, annotation in found.items()} == {
        "caf0_": ["picture 0"],
        "caf1_": ["picture 1"],
    }
    stored = {(annotation.model_extra or {})["file"] for annotation in found.values()}
    assert stored == {escape_name(f"caf{number}\udce9.jpg") for number in range(2)}
    capsys.readouterr().out.encode("utf-8", "strict")


def test_a_split_that_is_none_is_refused_before_it_is_streamed(tmp_path, capsys, monkeypatch):
    def streamed(*arguments):
        raise AssertionError

    monkeypatch.setattr(forms, "add_image", streamed)
    place, files = tmp_path / "set", []
    for number, name in enumerate(("train", "test", "extra")):
        as_parquet(place / f"{name}.parquet", structs()[4 * number : 4 * number + 4])
        files.append({"split": name, "path": f"{name}.parquet"})
    about = json.dumps([{"config_name": "default", "data_files": files}])
    (place / "README.md").write_text(f"---\nconfigs: {about}\n---\n")
    assert main(["import", f"hub:{place}", "--out", str(tmp_path / "out"), "--processes", "1"]) == 2
    said = capsys.readouterr().err
    assert "'extra' is not a split, but there are train and test; choose others with" in said


def test_a_row_that_points_out_of_the_data_set_is_counted_and_not_read(tmp_path):
    rows = structs()[:8]
    private = tmp_path / "private" / "me.jpg"
    private.parent.mkdir()
    private.write_bytes(rows[0]["image"]["bytes"])
    for row, path in zip(rows, (f"{private}", f"file://{private}", "http://127.0.0.1:9/me.jpg")):
        row["image"] = {"bytes": None, "path": path}
    rows[3]["image"]["path"] = None
    as_parquet(tmp_path / "set" / "train.parquet", rows)
    out = tmp_path / "out"
    command = ["import", f"hub:{tmp_path / 'set'}", "--out", str(out), "--processes", "1"]
    assert main([*command, "--split", "1", "0", "0"]) == 0
    manifest = json.loads((out / "train" / "manifest.json").read_text())
    assert manifest["samples"] == 5
    assert ShardIndex.open(out / "train").read(0, 0).key == "train-00000003"
    assert manifest["failures"]["image outside the data set"]["count"] == 3
    assert forms._is_inside("zip://a.jpg::hf://datasets/me/set@abc/a.zip", "me/set")
    for path in (
        "file:///etc/x::hf://datasets/me/set@abc/a.zip",
        "hf://datasets/me/setting@abc/a.jpg",
        "https://example.org/a.jpg",
        "/etc/a.jpg",
    ):
        assert not forms._is_inside(path, "me/set")
