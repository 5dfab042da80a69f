"""Data sets, lists and archives: small good files, and what reads them in converters and tasks."""

import contextlib
import gzip
import io
import json
import pickle
import zipfile

from broken_images import photo
from broken_shards import END, member

from data_tools.__main__ import main as data_tools
from data_tools.originals import Originals, unpacked
from vlp.config import ConfigError
from vlp.data.labelled_images import open_labelled
from vlp.data.shards.sample_files import BadSample
from vlp.tasks.detection.data import CocoImages, CocoSource
from vlp.tasks.grids.arc import read_tasks
from vlp.tasks.vqa.data import read_answers
from vlp.tasks.widgets.data import RicoScreensConfig, open_screens

PNG = photo("png")


def make_screens(folder):
    node = {"bounds": [0, 0, 700, 1200], "class": "android.widget.Button", "text": "go"}
    tree = {"activity": {"root": {"bounds": [0, 0, 1440, 2560], "class": "x", "children": [node]}}}
    (folder / "1.json").write_text(json.dumps(tree))
    (folder / "2.json").write_text(json.dumps(tree))
    (folder / "captions.csv").write_text(
        'screenId,nodeId,captions\n1,0,go|"go on"\n2,0.0,"press, now"\n'
    )
    (folder / "split.txt").write_text("1\n2\n")


def read_screens(folder, before, target):
    split = str(folder / "split.txt")
    config = RicoScreensConfig(
        hierarchies=str(folder), captions=str(folder / "captions.csv"), train=split, test=split
    )
    screens = open_screens(config, "train")
    for number in range(len(screens)):
        with contextlib.suppress(BadSample):
            screens.read(number)


def make_arc(folder):
    pair = {"input": [[0, 1], [2, 3]], "output": [[1, 1]]}
    task = json.dumps({"train": [pair, pair], "test": [pair]}).encode()
    (folder / "0a.json").write_bytes(task)
    (folder / "tasks.tar.gz").write_bytes(gzip.compress(member("t/0a.json", task) + END))


def read_arc(folder, before, target):
    read_tasks(str(folder / target if target.endswith("gz") else folder), ["0a"])


def make_labelled(folder):
    images = [member(f"{label}/{n}.png", PNG) for label in "ab" for n in range(2)]
    (folder / "images.tar").write_bytes(b"".join(images) + END)
    (folder / "images.tar.gz").write_bytes(gzip.compress(b"".join(images) + END))


def read_labelled(folder, before, target):
    images = open_labelled(str(folder / target))
    for number in range(len(images)):
        with contextlib.suppress(BadSample):
            images.read(number)


def make_coco(folder):
    images = [{"id": n, "file_name": f"{n}.png", "width": 20, "height": 16} for n in range(3)]
    objects = [
        {"id": n, "image_id": n, "category_id": 7, "bbox": [1, 1, 5, 5], "area": 25, "iscrowd": 0}
        for n in range(3)
    ]
    content = {
        "images": images, "annotations": objects, "categories": [{"id": 7, "name": "dog"}]
    }  # fmt: skip
    (folder / "instances.json").write_text(json.dumps(content))
    files = [member(f"{n}.png", PNG) for n in range(3)]
    (folder / "images.tar").write_bytes(b"".join(files) + END)
    (folder / "images").mkdir()
    for number in range(3):
        (folder / "images" / f"{number}.png").write_bytes(PNG)


def read_coco(folder, before, target):
    place = "images.tar" if target.endswith("tar") else "images"
    annotations = str(folder / "instances.json")
    source = CocoSource(format="coco", annotations=annotations, images=str(folder / place))
    images = CocoImages(source)
    for number in range(len(images)):
        with contextlib.suppress(BadSample):
            images.read(number)


def make_originals(folder):
    files = {f"{name}.png": PNG for name in "abc"}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    packed = b"".join(member(name, content) for name, content in files.items()) + END
    (folder / "own").mkdir()
    (folder / "own" / "good.png").write_bytes(PNG)
    (folder / "a.zip").write_bytes(stream.getvalue())
    (folder / "a.tar").write_bytes(packed)
    (folder / "a.tar.gz").write_bytes(gzip.compress(packed))


def read_originals(folder, before, target):
    with unpacked([folder / "own", folder / target], folder / "room") as places:
        originals = Originals(places)
        assert originals.read("good.png") == PNG
        for name in ("a.png", "b.png", "c.png"):
            with contextlib.suppress(BadSample):
                data = originals.read(name)
                assert data is None or len(data) < 2**26


def make_lists(folder):
    sentences = [{"raw": "a red dog", "sentid": 1}]
    images = [
        {"filename": f"{n}.jpg", "imgid": n, "split": "train", "sentences": sentences}
        for n in range(3)
    ]
    (folder / "karpathy.json").write_text(json.dumps({"images": images, "dataset": "flickr8k"}))
    rows = "".join(f"a red dog {n}\thttp://x.org/{n}.jpg\n" for n in range(4))
    (folder / "cc3m.tsv").write_text(rows)
    (folder / "cc3m.tsv.gz").write_bytes(gzip.compress(rows.encode()))
    (folder / "images").mkdir()
    for number in range(3):
        (folder / "images" / f"{number}.jpg").write_bytes(photo("jpeg", seed=number))


def read_lists(folder, before, target):
    arguments = ["cc3m", "--annotations", folder / target, "--urls-only", "--out", folder / "out"]
    if target.endswith("json") or target.startswith("images"):
        arguments = ["flickr8k", "--annotations", folder / "karpathy.json"]
        arguments += ["--images", folder / "images", "--out", folder / "out", "--processes", 1]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = data_tools([*map(str, arguments)])
    assert code in (0, 2), (code, said.getvalue())
    if code == 2:
        raise ConfigError(said.getvalue().strip().rpartition("\r")[2].splitlines()[-1])


def make_annotations(folder):
    rows = [{"question_id": n, "image_id": n, "question": "what?"} for n in range(4)]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (folder / "refs.p").write_bytes(pickle.dumps([{"ref_id": 1, "sentences": [{"raw": "x"}]}]))
    (folder / "answers.json").write_text('["yes", "no", "2"]')


def read_annotations(folder, before, target):
    from data_tools.converters.refcoco import read_refs
    from data_tools.rows import json_lines, json_list, streamed_list

    if target == "answers.json":
        read_answers(folder / target)
    elif target == "refs.p":
        list(read_refs(folder / target))
    elif target == "rows.jsonl":
        list(json_lines(folder / target, []))
    else:
        list(json_list(folder / target))
        if target == "rows.json":
            list(streamed_list(folder / target))
