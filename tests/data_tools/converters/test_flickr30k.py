from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_files import json_of, samples_of, tar_of
from raw_images import raw_image

from data_tools.__main__ import main
from vlp.data.schema import captions_of

NUMBERS = (1000092795, 10002456, 1000268201, 1000344755)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    files = {f"flickr30k-images/{number}.jpg": raw_image(number) for number in NUMBERS}
    return tar_of(tmp_path / "flickr30k-images.tar", files)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    lines = [
        f"{number}.jpg#{place}\tcaption {place} of {number} ."
        for number in NUMBERS
        for place in range(5)
    ]
    path = tmp_path / "results_20130124.token"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_official_captions_with_lists(photos: Path, token: Path, tmp_path: Path) -> None:
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


def test_karpathys_layout_gives_the_same_identity(photos: Path, tmp_path: Path) -> None:
    images = [
        {"filename": f"{number}.jpg", "split": "test", "sentences": [{"raw": "a caption"}]}
        for number in NUMBERS
    ]
    path = json_of(tmp_path / "dataset_flickr30k.json", {"dataset": "flickr30k", "images": images})
    arguments = ["flickr30k", "--annotations", str(path), "--images", str(photos)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    samples = samples_of(tmp_path / "out" / "test")
    identities = [(one.annotation.source, one.annotation.image_id) for one in samples.values()]
    assert identities == [("flickr30k", str(number)) for number in NUMBERS]


def test_what_cannot_be_used(
    photos: Path, token: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["flickr30k", "--images", str(photos), "--out", str(tmp_path / "out")]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("10002456\n")
    lists = ["--lists", str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert main([*arguments, "--annotations", str(token), *lists]) == 2
    assert "b.txt: 10002456 is in a too" in capsys.readouterr().err
    path = json_of(tmp_path / "dataset.json", {"dataset": "flickr30k", "images": []})
    assert main([*arguments, "--annotations", str(path), *lists]) == 2
    assert "the JSON has its own splits" in capsys.readouterr().err
    token.write_text(token.read_text() + "no tab here\n")
    assert main([*arguments, "--annotations", str(token)]) == 2
    assert "results_20130124.token, line 21: this should be" in capsys.readouterr().err
    assert main([*arguments, "--annotations", str(tmp_path / "none.token")]) == 2
    assert "none.token: cannot be read" in capsys.readouterr().err
