import hashlib
import json
import zlib

import pytest
from benchmark_files import failures_of, json_of, samples_of, tar_of
from raw_images import raw_image

from data_tools.__main__ import main
from data_tools.converters.web import image_id_of
from vlp.data.schema import captions_of

URL = "http://x.org/{}.jpg"


@pytest.fixture
def tsv(tmp_path):
    captions = [f"image &amp; {number}" for number in range(12)]
    captions[3], captions[5] = "www.x.org", " "
    lines = [f"{caption}\t{URL.format(number)}" for number, caption in enumerate(captions)]
    lines[7] = "one\ttwo\tthree"
    path = tmp_path / "cc3m.tsv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def downloaded(folder, numbers, url=True):
    """Tars as img2dataset 1.47 writes them: three files of each key, tar and place in it."""
    folder.mkdir()
    for shard, members in enumerate(numbers):
        files = {}
        for place, number in enumerate(members):
            key = f"{shard:05d}{place}"
            about = {"caption": f"image &amp; {number}", "key": key, "status": "success"}
            about |= {"url": URL.format(number)} if url else {}
            files[f"{key}.jpg"] = raw_image(number)
            files[f"{key}.json"] = json.dumps(about, indent=4).encode()
            files[f"{key}.txt"] = about["caption"].encode()
        tar_of(folder / f"{shard:05d}.tar", files)
        (folder / f"{shard:05d}_stats.json").write_text("{}")
        (folder / f"{shard:05d}.parquet").write_bytes(b"PAR1")
    return folder


@pytest.mark.parametrize("header", ["\ufeffcaption\turl", "url\tcaption"])
def test_a_header_names_the_columns_and_is_no_row(header, tmp_path, capsys):
    rows = [["a dog", URL.format(0)], ["a cat", URL.format(1)]]
    lines = [header, *("\t".join(row[:: -1 if header.startswith("u") else 1]) for row in rows)]
    (tmp_path / "list.tsv").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "00000000.jpg").write_bytes(raw_image(0))
    command = ["cc3m", "--annotations", str(tmp_path / "list.tsv"), "--images", str(tmp_path)]
    assert main([*command, "--out", str(tmp_path / "out"), "--processes", "1"]) == 0
    samples = samples_of(tmp_path / "out")
    assert captions_of(samples["cc3m-00000000"].annotation) == ["a dog"]
    assert failures_of(tmp_path / "out") == {"missing image": ["cc3m-00000001"]}


def test_downloads_are_joined_by_url(tsv, tmp_path):
    folder = downloaded(tmp_path / "got", [[4, 0, 2], [11, 8, 3], [1, 9]])
    out = tmp_path / "out"
    arguments = ["cc3m", "--annotations", str(tsv), "--img2dataset", str(folder)]
    arguments += ["--samples-per-shard", "4", "--processes", "2"]
    assert main([*arguments, "--out", str(out)]) == 0
    samples = samples_of(out)
    assert list(samples) == [f"cc3m-{number:08d}" for number in (0, 1, 2, 4, 8, 9, 11)]
    for key, sample in samples.items():
        number = int(key[-8:])
        assert sample.image == raw_image(number)
        assert captions_of(sample.annotation) == [f"image & {number}"]
        assert sample.annotation.source == "cc3m"
        assert sample.annotation.image_id == image_id_of(URL.format(number))
        assert sample.annotation.model_extra == {"url": URL.format(number)}
    assert failures_of(out) == {
        "caption of a URL alone": ["cc3m-00000003"],
        "empty caption": ["cc3m-00000005"],
        "line of another layout": ["line 8"],
        "missing image": ["cc3m-00000006", "cc3m-00000010"],
    }


def test_downloads_that_are_damaged_or_name_no_url(tsv, tmp_path, capsys):
    folder = downloaded(tmp_path / "got", [[0, 1], [2, 4]])
    path = folder / "00001.tar"
    path.write_bytes(path.read_bytes()[:-9000])
    arguments = ["cc3m", "--annotations", str(tsv), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--img2dataset", str(folder)]) == 0
    without = downloaded(tmp_path / "without", [[0, 1]], url=False)
    arguments[-1] = str(tmp_path / "other")
    assert main([*arguments, "--img2dataset", str(without)]) == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main([*arguments, "--img2dataset", str(empty)]) == 2
    assert "--output_format webdataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (None, "00000002.jpg"),
        ("{row}", "2.webp"),
        ("{row}_{crc32}", f"2_{zlib.crc32(URL.format(2).encode())}"),
        ("{md5}", hashlib.md5(URL.format(2).encode()).hexdigest() + ".jpeg"),
        ("{sha256}", "ab/cd/" + hashlib.sha256(URL.format(2).encode()).hexdigest() + ".png"),
        ("{file}", "2.jpg"),
    ],
)
def test_images_named_by_a_rule(tsv, tmp_path, rule, name):
    place = tmp_path / "images" / name
    place.parent.mkdir(parents=True)
    place.write_bytes(raw_image(2))
    arguments = ["cc3m", "--annotations", str(tsv), "--images", str(tmp_path / "images")]
    arguments += ["--out", str(tmp_path / "out")] + (["--names", rule] if rule else [])
    assert main(arguments) == 0
    assert list(samples_of(tmp_path / "out")) == ["cc3m-00000002"]


def test_a_rule_that_cannot_be(tsv, tmp_path, capsys):
    arguments = ["cc3m", "--annotations", str(tsv), "--images", str(tmp_path)]
    for rule in ("{rows}", "{row", "{}", "{row.x}"):
        assert main([*arguments, "--names", rule, "--out", str(tmp_path / "out")]) == 2
        assert "use only row, md5, sha256, crc32, file in braces" in capsys.readouterr().err


def test_urls_to_download(tsv, tmp_path):
    quoted = tsv.read_text() + f'a "quoted" word\t{URL.format(12)}\n'
    tsv.write_text(quoted)
    said = tmp_path / "said.txt"
    said.write_text(f"{URL.format(4)}\ncc3m-00000006\n")
    arguments = ["cc3m", "--annotations", str(tsv), "--urls-only", "--take-down", str(said)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "urls.tsv").read_text().splitlines()
    assert lines[0] == "url\tcaption"
    assert lines[1:] == [
        *(f"{URL.format(number)}\timage & {number}" for number in (0, 1, 2, 8, 9, 10, 11)),
        f'{URL.format(12)}\t"a ""quoted"" word"',
    ]


def test_sbu(shared, tmp_path, capsys):
    content = json.loads((shared / "data" / "web_formats" / "sbu_schema.json").read_text())
    content["captions"].pop()
    path = json_of(tmp_path / "sbu.json", content)
    arguments = ["sbu", "--annotations", str(path), "--images", str(tmp_path)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert "2 image_urls, 1 captions and 2 user_ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no row can be used"),
        (b"a caption without a url\n", "line 1: this should be caption<TAB>url"),
        (b"http://x.org/a.jpg\ta caption\n", "line 1: this should be caption<TAB>url"),
        (b"\xff\tnothing\n", "line 1: not UTF-8"),
    ],
)
def test_lists_that_cannot_be_used(tmp_path, capsys, content, message):
    path = tmp_path / "list.tsv"
    path.write_bytes(content)
    for how in (["--urls-only"], ["--images", str(tmp_path)]):
        arguments = ["cc3m", "--annotations", str(path), *how]
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "list.tsv" in error
        assert not (tmp_path / "out").exists()
