"""What the product reads, as small good files and the code that reads them."""

import contextlib
import gzip
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from broken_images import photo
from broken_shards import END, full_annotation, member, plain_tar
from tests_support import CAPTIONS, TINY_MODEL, tiny_text
from training_toy import PlainEngine, ToyTask, toy_config

import vlp
from data_tools.__main__ import main as data_tools
from data_tools.builder.write_shard import Journal
from data_tools.originals import Originals, unpack_archives
from data_tools.verify import against_index, against_manifest, read_manifest
from evaluation.report.sources import read_sources
from evaluation.results import read_lines
from evaluation.samples import EvaluationError
from vlp.config import ConfigError, load_config
from vlp.data.config import AugmentConfig, DataConfig, SourceConfig
from vlp.data.features.store import (
    FeatureHeader,
    FeatureSource,
    StoredFeatures,
    file_paths,
    shards_sha256,
)
from vlp.data.image.transforms import Preprocessing
from vlp.data.labelled_images import open_labelled
from vlp.data.pretrain import PretrainData
from vlp.data.shards.index import survey
from vlp.data.shards.remote import RemoteFolder
from vlp.data.shards.sample_files import KINDS, BadSample, DataError
from vlp.data.shards.shard_reader import ShardIndex, index_folder
from vlp.data.stream.batch import Inputs, PatchMasking
from vlp.data.stream.sampler import Request, SampleIndex
from vlp.models.config import ModelConfig
from vlp.models.folder import save_pretrained
from vlp.models.pretrained.published import read_tensors
from vlp.models.vlp import VLPModel
from vlp.tasks.detection.data import CocoImages, CocoSource
from vlp.tasks.grids.arc import read_tasks
from vlp.tasks.vqa.data import read_answers
from vlp.tasks.widgets.data import RicoScreensConfig, open_screens
from vlp.training.checkpoints import SUMS, CheckpointError, Checkpoints
from vlp.training.config import PretrainConfig
from vlp.training.progress import Progress

Files = dict[str, bytes]


class Reader(NamedTuple):
    """Good files, which of them are mutated, and what reads them all.

    make(folder) is given a folder called by a number, of which it may make other files.
    read(folder, before, target): `before` are the files as they were; raises one of `errors`, or
    AssertionError where a good sample was lost.
    """

    make: Callable[[Path], None]
    targets: str
    read: Callable[[Path, Files, str], object]
    errors: tuple[type[Exception], ...] = (ConfigError,)
    weight: int = 1


# --- Shards ---

INPUTS = Inputs(16, (4, 4), 12, 64, word_masking=0.15, patch_masking=PatchMasking(0.5, 2))
IMAGES = {
    "jpg": photo("jpeg"),
    "progressive": photo("jpeg", progressive=True),
    "cmyk": photo("jpeg", mode="CMYK"),
    "turned": photo("jpeg", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
    "png": photo("png"),
    "palette": photo("png", mode="P"),
    "webp": photo("webp"),
    "gif": photo("gif", mode="P"),
    "bmp": photo("bmp"),
}


def annotation(number):
    return full_annotation(number, [f"a red circle {number}", "a blue square"])


def samples_of(files):
    """Five samples; the third one's files are those that may be mutated."""
    good = [(f"k{n}", {"png": IMAGES["png"], "json": annotation(n)}) for n in range(5)]
    good[2] = ("k2", {name.partition(".")[2]: content for name, content in files.items()})
    return good


def make_sample(folder):
    name = list(IMAGES)[int(folder.name) % len(IMAGES)]
    (folder / "sample.jpg").write_bytes(IMAGES[name])
    (folder / "sample.json").write_bytes(annotation(2))


def read_sample(folder, before, target):
    """A mutated image or annotation among good samples, which all stay."""
    files = {name: (folder / name).read_bytes() for name in before}
    shards = folder / "shards"
    shards.mkdir()
    (shards / "0.tar").write_bytes(plain_tar(samples_of(files)))
    index_folder(shards)
    valid = [slot for _, slot in slots(shards)]
    assert all(valid[place] for place in (0, 1, 3, 4)), valid


def make_shards(folder):
    for number in range(2):
        files = {"s.jpg": IMAGES["jpg"], "s.txt": b"a red circle"}
        (folder / f"{number}.tar").write_bytes(plain_tar(samples_of(files)))
    index_folder(folder)


def read_indexed(folder, before, target):
    """A mutated shard behind its index: samples before the first changed byte stay."""
    data = (folder / target).read_bytes()
    same = next((n for n, (a, b) in enumerate(zip(before[target], data)) if a != b), len(data))
    ends = ShardIndex.open(folder)._all_rows(wait=True)
    for number, (place, good) in enumerate(slots(folder)):
        end = 512 * (int(ends[number]["start"]) + int(ends[number]["blocks"]))
        assert good or (place == target and end > same), (place, number, end, same)


def read_tar(folder, before, target):
    """A mutated shard that is then indexed: the other shard stays."""
    index_folder(folder)
    for place, good in slots(folder):
        assert good or place == target
    with contextlib.suppress(ConfigError):
        survey(folder / target)


def read_index(folder, before, target):
    index = ShardIndex.open(folder)
    against_index(folder, {})
    if len(index) < 1000:  # a digit more can make any number of samples
        list(slots(folder))


def slots(folder):
    """Every place of the index: the shard's name, and whether training gets a sample of it."""
    config = DataConfig(
        sources=(SourceConfig(path=str(folder)),),
        canonical_streams=1,
        workers=0,
        augment=AugmentConfig(randaugment=False, crop_scale=(1.0, 1.0), hflip=False),
    )
    data = PretrainData(config, INPUTS, 1, seed=1, tokenizer=TEXT)
    [index] = data.indices
    outcomes = []
    for shard, entry in enumerate(index.shards):
        for position in range(entry.samples):
            slot = data.samples[Request(0, SampleIndex(0, shard, position, 0))]
            if slot.skip is not None:
                assert slot.skip.kind in KINDS
                assert "\n" not in slot.skip.where.strip(), slot.skip
            outcomes.append((entry.name, slot.valid))
    return outcomes


TEXT = tiny_text()


def make_manifest(folder):
    shards = [{"name": f"{n}.tar", "samples": 5, "bytes": 9, "sha256": "ab" * 32} for n in range(3)]
    (folder / "manifest.json").write_text(json.dumps({"shards": shards, "title": "x"}))
    (folder / "take_down.txt").write_text("# taken down\nk1\nhttp://x.org/a.jpg # why\n")
    (folder / "built").mkdir()
    with Journal(folder / "built", {"a": 1}) as journal:
        assert journal.records == {}
    record = {"number": 0, "wanted": 1, "inputs": "x", "samples": 0}
    with (folder / "built" / "build.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_manifests(folder, before, target):
    from data_tools.builder.samples import TakeDown

    names = np.array([f"{number}.tar".encode() for number in range(3)])
    digests = RemoteFolder(f"file://{folder}").digests(names)
    assert all(len(digest) == 64 and digest.isalnum() for digest in digests.values())
    entries, _ = read_manifest(folder)
    against_manifest(folder, entries or [], {})
    TakeDown.read(folder / "take_down.txt")
    with Journal(folder / "built", {"a": 1}):
        pass


# --- Models and runs ---


def make_checkpoints(folder):
    config, task = toy_config(), ToyTask()
    task.average = {"a": torch.ones(3)}
    checkpoints = Checkpoints(folder, config)
    for step in (1, 2):
        checkpoints.save(PlainEngine(task, config.training), task, Progress(step=step, samples=8))


def _sum_again(folder, before, target):
    from vlp.io import sha256_of

    sums = folder / "step_2" / SUMS
    if len(before[target]) % 2 and target != f"step_2/{SUMS}":  # whoever changes files knows sums
        files = sorted(path for path in sums.parent.iterdir() if path.name != SUMS)
        sums.write_text("".join(f"{sha256_of(path)}  {path.name}\n" for path in files))


def read_checkpoints(folder, before, target):
    _sum_again(folder, before, target)
    config, task = toy_config(), ToyTask()
    progress = Checkpoints(folder, config).load(PlainEngine(task, config.training), task)
    assert progress is not None
    assert progress.step in (1, 2)


def make_model(folder):
    config = ModelConfig.model_validate(TINY_MODEL)
    model = VLPModel(config)
    heads = {"mlm_head.bias": torch.zeros(4)}
    save_pretrained(folder, config, model.state_dict(), TEXT, Preprocessing(16), heads)


def read_model(folder, before, target):
    loaded = vlp.load(folder)
    loaded.text(CAPTIONS)


def make_tensors(folder):
    torch.save({"model": {"a": torch.ones(3), "b": torch.zeros(2, 2)}}, folder / "weights.pth")
    torch.save({"a": torch.ones(3)}, folder / "old.pth", _use_new_zipfile_serialization=False)


def read_weights(folder, before, target):
    read_tensors(folder / target)


def make_config(folder):
    (folder / "base.yaml").write_text(
        "model: &model\n  text: {vocab_size: 64, width: 768}\n  embed_dim: 8\n"
        "data:\n  sources: [{path: shards, weight: 2.5}]\n  canonical_streams: 4\n"
    )
    (folder / "run.yaml").write_text(
        "inherit: base.yaml\noutput: runs/x  # here\ntraining:\n  batch: 64\n  optimiser:\n"
        "    learning_rate: 1e-3\n    betas: [0.9, 0.95]\nlimits: {pixels: 2000000}\n"
    )


def read_config(folder, before, target):
    load_config(folder / "run.yaml", PretrainConfig)


def make_run(folder):
    make_config(folder)
    (folder / "run.yaml").rename(folder / "config.yaml")
    steps = [{"step": n, "loss": 1.5 / n, "samples": 64 * n} for n in range(1, 5)]
    (folder / "log.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    report = {"steps": 4, "skipped_samples": {"no text": 3}, "seconds": 2.5}
    (folder / "report.json").write_text(json.dumps(report))
    figure = {"value": 0.5, "low": 0.4, "high": 0.6, "chance": 0.1}
    result = {
        "task": "vqa",
        "figures": {"accuracy": figure},
        "samples": 9,
        "skipped": {"no text": 1},
    }
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "vqa.json").write_text(json.dumps(result))
    (folder / "rows.jsonl").write_text('{"key": "a", "score": 1.5}\n{"key": "b", "score": 2}\n')


def read_run(folder, before, target):
    [source] = read_sources([folder])
    assert isinstance(source.training, dict)
    read_lines(folder / "rows.jsonl")


def make_features(folder):
    (folder / "shards").mkdir()
    make_shards(folder / "shards")
    index = ShardIndex.open(folder / "shards")
    FeatureHeader(
        tower={"width": 4},
        weights="ab" * 32,
        image_size=16,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        augment=None,
        views=2,
        seed=0,
        precision="float32",
        dtype="float16",
        tokens=3,
        width=4,
        kinds=KINDS,
        sources=(FeatureSource(name="s", shards=2, samples=10, index=shards_sha256(index.shards)),),
    ).write(folder)
    for shard in index.shards:
        features, codes, checksums = file_paths(folder, 0, shard.name)
        features.parent.mkdir(exist_ok=True)
        np.save(features, np.zeros((5, 2, 3, 4), "<f2"))
        np.save(codes, np.zeros((5, 2), "u1"))
        np.save(checksums, np.zeros(5, "<u4"))


def read_features(folder, before, target):
    stored = StoredFeatures(folder)
    index = ShardIndex.open(folder / "shards")
    sources = stored.require(Preprocessing(16), [index])
    for shard in range(2):
        for sample in range(5):
            with contextlib.suppress(BadSample, DataError):
                for view in sources[0].views(shard, sample, b"", True, "x"):
                    sources[0].read(shard, sample, view)


# --- Data sets, lists and archives ---
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
    images = [member(f"{label}/{n}.png", IMAGES["png"]) for label in "ab" for n in range(2)]
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
    files = [member(f"{n}.png", IMAGES["png"]) for n in range(3)]
    (folder / "images.tar").write_bytes(b"".join(files) + END)
    (folder / "images").mkdir()
    for number in range(3):
        (folder / "images" / f"{number}.png").write_bytes(IMAGES["png"])


def read_coco(folder, before, target):
    place = "images.tar" if target.endswith("tar") else "images"
    annotations = str(folder / "instances.json")
    source = CocoSource(format="coco", annotations=annotations, images=str(folder / place))
    images = CocoImages(source)
    for number in range(len(images)):
        with contextlib.suppress(BadSample):
            images.read(number)


def make_originals(folder):
    files = {f"{name}.png": IMAGES["png"] for name in "abc"}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    packed = b"".join(member(name, content) for name, content in files.items()) + END
    (folder / "own").mkdir()
    (folder / "own" / "good.png").write_bytes(IMAGES["png"])
    (folder / "a.zip").write_bytes(stream.getvalue())
    (folder / "a.tar").write_bytes(packed)
    (folder / "a.tar.gz").write_bytes(gzip.compress(packed))


def read_originals(folder, before, target):
    with unpack_archives([folder / "own", folder / target], folder / "room") as places:
        originals = Originals(places)
        # A mutant that has another good.png makes the name ambiguous, which is said.
        good = originals.find("good.png")
        assert good.read() == IMAGES["png"] if good else originals.problems
        for name in ("a.png", "b.png", "c.png"):
            with contextlib.suppress(BadSample):
                location = originals.find(name)
                assert location is None or len(location.read()) < 2**26


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
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        code = data_tools([*map(str, arguments)])
    assert code in (0, 2), (code, stderr.getvalue())
    if code == 2:
        raise ConfigError(stderr.getvalue().strip().rpartition("\r")[2].splitlines()[-1])


def make_annotations(folder):
    rows = [{"question_id": n, "image_id": n, "question": "what?"} for n in range(4)]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (folder / "refs.p").write_bytes(pickle.dumps([{"ref_id": 1, "sentences": [{"raw": "x"}]}]))
    (folder / "answers.json").write_text('["yes", "no", "2"]')


def read_annotations(folder, before, target):
    from data_tools.converters.refcoco import read_refs
    from data_tools.rows import json_lines, json_rows, streamed_list

    if target == "answers.json":
        read_answers(folder / target)
    elif target == "refs.p":
        list(read_refs(folder / target))
    elif target == "rows.jsonl":
        list(json_lines(folder / target, []))
    else:
        list(json_rows(folder / target, []))
        if target == "rows.json":
            list(streamed_list(folder / target, []))


_MODEL_ERRORS = (ConfigError, ValueError, FileNotFoundError)

READERS = {
    "samples": Reader(make_sample, "sample.*", read_sample, weight=6),
    "shards": Reader(make_shards, "*.tar", read_indexed, weight=4),
    "new shards": Reader(make_shards, "*.tar", read_tar, weight=2),
    "index": Reader(make_shards, "*.np[yz]", read_index, weight=3),
    "manifest": Reader(make_manifest, "**/*.*", read_manifests, weight=2),
    "checkpoint": Reader(make_checkpoints, "step_2/*", read_checkpoints, (CheckpointError,), 2),
    "model": Reader(make_model, "*.*", read_model, _MODEL_ERRORS, 2),
    "weights": Reader(make_tensors, "*", read_weights, (ValueError, FileNotFoundError)),
    "configuration": Reader(make_config, "*", read_config, weight=2),
    "run": Reader(make_run, "**/*.*", read_run, (EvaluationError,), 2),
    "features": Reader(make_features, "**/*.[jn][sp]*", read_features),
    "screens": Reader(make_screens, "*", read_screens, weight=2),
    "arc": Reader(make_arc, "*", read_arc),
    "labelled": Reader(make_labelled, "*", read_labelled),
    "coco": Reader(make_coco, "*.*", read_coco, weight=2),
    "originals": Reader(make_originals, "a.*", read_originals, weight=2),
    "lists": Reader(make_lists, "**/*.*", read_lists),
    "annotations": Reader(make_annotations, "*", read_annotations, weight=2),
}
