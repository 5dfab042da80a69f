import io
import itertools
import json

import numpy as np
from benchmark_files import failures_of, lines_of, photo, said_of, samples_of, tar_of
from PIL import Image
from test_contract import pair, statement

from data_tools.__main__ import main
from vlp.data.shards.tar import read_files


def test_real_pairs(shared, tmp_path):
    data = shared / "data_tasks" / "nlvr2"
    arguments = ["nlvr2", "--annotations", str(data / "with_images.json"), "--processes", "1"]
    arguments += ["--images", str(data / "images_384.tar"), "--extension", "jpg"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    images = {str(name): content for name, content in read_files(data / "images_384.tar", bool)}
    rows = [json.loads(line) for line in (data / "with_images.json").read_text().splitlines()]
    samples = list(samples_of(tmp_path).values())
    assert len(samples) == len(rows) == 16
    for row, sample in zip(rows, samples):
        pair = row["identifier"].rpartition("-")[0]
        assert sample.key == row["identifier"]
        assert sample.image == images[f"{pair}-img0.jpg"]
        assert sample.second_image == images[f"{pair}-img1.jpg"]
        fields = said_of(sample)
        assert (fields["statement"], fields["left_url"]) == (row["sentence"], row["left_url"])


def pixels(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image)


def boxes_image(values):
    array = np.full((100, 400, 4), 255, np.uint8)
    for number, value in enumerate(values):
        array[:, 150 * number : 150 * number + 100, :3] = value
    stream = io.BytesIO()
    Image.fromarray(array, "RGBA").save(stream, "png")
    return stream.getvalue()


def test_real_examples_in_all_permutations(shared, tmp_path):
    data = shared / "data_tasks" / "nlvr_v1"
    rows = [json.loads(line) for line in (data / "dev.jsonl").read_text().splitlines()[:20]]
    annotations = lines_of(tmp_path / "dev.json", rows)
    arguments = ["nlvr_v1", "--annotations", str(annotations), "--split", "dev"]
    arguments += ["--images", str(data / "dev_images.tar.xz"), "--permutations", "6"]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--processes", "1"]) == 0
    samples = samples_of(tmp_path / "out")
    assert len(samples) == 120
    assert failures_of(tmp_path / "out") == {}
    assert not list((tmp_path / "out").glob(".unpacked-*"))
    files = read_files(data / "dev_images.tar.xz", lambda name: True)
    stored = {name.stem: content for name, content in files}
    orders = list(itertools.permutations(range(3)))
    for row in rows:
        original = pixels(stored[f"dev-{row['identifier']}-0"])[..., :3]
        for number, order in enumerate(orders):
            sample = samples[f"dev-{row['identifier']}-{number}"]
            found = pixels(sample.image)
            assert found.shape == (100, 400, 3)
            expected = original.copy()
            for place, box in enumerate(order):
                columns = slice(150 * place, 150 * place + 100)
                expected[:, columns] = original[:, 150 * box : 150 * box + 100]
            np.testing.assert_array_equal(found, expected)
            assert said_of(sample) == {
                "version": 1,
                "source": "nlvr",
                "image_id": f"dev-{row['identifier']}",
                "statement": row["sentence"],
                "label": row["label"] == "true",
                "identifier": row["identifier"],
                "permutation": number,
            }


def test_a_published_permutation_is_taken_as_it_is(tmp_path):
    files = {
        "images/dev/3/dev-1-0-0.png": boxes_image((10, 20, 30)),
        "images/dev/3/dev-1-0-3.png": boxes_image((1, 2, 3)),
    }
    tar = tar_of(tmp_path / "images.tar", files)
    annotations = lines_of(tmp_path / "dev.json", [statement("1-0", directory="3")])
    arguments = ["nlvr_v1", "--annotations", str(annotations), "--split", "dev", "--permutations"]
    arguments += ["6", "--images", str(tar), "--out", str(tmp_path / "out"), "--processes", "1"]
    assert main(arguments) == 0
    middles = [
        tuple(int(pixels(sample.image)[50, column, 0]) for column in (50, 200, 350))
        for sample in samples_of(tmp_path / "out").values()
    ]
    assert middles == [
        (10, 20, 30), (10, 30, 20), (20, 10, 30), (1, 2, 3), (30, 10, 20), (30, 20, 10),
    ]  # fmt: skip


def test_nothing_to_convert(tmp_path, capsys):
    (tmp_path / "7.jpg").write_bytes(photo())
    annotations = lines_of(tmp_path / "dev.jsonl", [pair("b", gold_label="-")])
    arguments = ["snli_ve", "--annotations", str(annotations), "--images", str(tmp_path)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert "no row can be used; the first is of kind 'no gold label': b" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    lines_of(annotations, [pair("b", Flickr30K_ID="8")])
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 1
