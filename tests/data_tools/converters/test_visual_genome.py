from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmark_files import failures_of, json_of, samples_of
from raw_images import raw_image

from data_tools.__main__ import main
from vlp.data.schema import captions_of


def region(number: int, phrase: str, *box: int) -> dict[str, Any]:
    x, y, width, height = box
    return {
        "region_id": number, "image_id": 1, "phrase": phrase,
        "x": x, "y": y, "width": width, "height": height,
    }  # fmt: skip


def test_the_real_layout(shared: Path, tmp_path: Path) -> None:
    path = shared / "data" / "web_formats" / "visual_genome_region_descriptions_schema.json"
    (tmp_path / "VG_100K").mkdir()
    (tmp_path / "VG_100K" / "1.jpg").write_bytes(raw_image(1, (800, 600)))
    arguments = ["visual_genome", "--regions", str(path), "--images", str(tmp_path / "VG_100K")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    [(key, sample)] = samples_of(tmp_path / "out").items()
    about = sample.annotation
    assert (key, about.source, about.image_id) == ("vg-1", "visual_genome", "1")
    assert captions_of(about) == ["the clock is green in colour", "shade is along the street"]
    assert [(one.id, one.text, one.box) for one in about.expressions or []] == [
        ("1382", "the clock is green in colour", [421, 57, 82, 139]),
        ("1383", "shade is along the street", [194, 372, 182, 228]),
    ]
    # This one does stick out, of the real image of 800 x 600 too.
    cut = {"box cut at the edge of its image (kept)": ["vg-1/expression 1383"]}
    assert failures_of(tmp_path / "out") == cut


def test_cocos_images_have_cocos_identity(tmp_path: Path) -> None:
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
    } == {
        "vg-1": ("coco", "139"),
        "vg-2": ("visual_genome", "2"),
        "vg-3": ("visual_genome", "3"),
    }
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
