import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from question_shards import coloured, photo, write_shards
from test_work_sharding import launch

import vlp
from evaluation.__main__ import main
from evaluation.embed import FeatureFiles, embed
from evaluation.options import EvalOptions
from evaluation.results import read_lines
from evaluation.samples import EvaluationError, Samples
from evaluation.work_sharding import ProcessGroup
from vlp.data.schema import Annotation

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("captions.jsonl", "captions.npy", "images.jsonl", "images.npy")


def test_rows_are_the_models_features_in_shard_order(model_folder, scene_shards, tmp_path):
    loaded = vlp.load(model_folder)
    found = embed(loaded, [scene_shards], tmp_path / "out", options=EvalOptions(batch=4))
    images = np.load(tmp_path / "out" / "images.npy", mmap_mode="r")
    captions = np.load(tmp_path / "out" / "captions.npy", mmap_mode="r")
    assert (len(images), len(captions)) == (found.images, found.captions)
    assert images.dtype == np.float32
    said = read_lines(tmp_path / "out" / "captions.jsonl")
    assert [row["key"] for row in read_lines(tmp_path / "out" / "images.jsonl")] == [
        f"{number:05d}" for number in range(21)
    ]
    row = 0
    for number, sample in enumerate(map(Samples([scene_shards]).read, range(21))):
        with torch.no_grad():
            image = loaded.model.encode_image(loaded.preprocess(sample.image)[None]).feature
            text = loaded.model.encode_text(*loaded.text(sample.captions)).feature
        assert images[number] == pytest.approx(image[0].numpy(), abs=1e-6)
        for count, caption in enumerate(sample.captions):
            assert captions[row] == pytest.approx(text[count].numpy(), abs=1e-6)
            assert (said[row]["text"], said[row]["caption"]) == (caption, count)
            assert said[row]["images"] == number
            row += 1
    assert row == found.captions


def test_half_precision_limits_and_images_without_captions(model_folder, tmp_path):
    samples = [(photo(side=20), Annotation(image_id="1")), (b"", Annotation()), *coloured(3)]
    shards = write_shards(tmp_path / "shards", samples)
    loaded = vlp.load(model_folder)
    options = EvalOptions(limit=4, batch=2)
    found = embed(loaded, [shards], tmp_path / "out", options, dtype="float16")
    assert (found.images, found.captions) == (3, 4)
    assert found.skipped == {"unreadable image": 1}
    assert np.load(tmp_path / "out" / "images.npy").dtype == np.float16
    captions = read_lines(tmp_path / "out" / "captions.jsonl")
    assert [row["images"] for row in captions] == [1, 1, 2, 2]
    plain = write_shards(tmp_path / "plain", samples[:1])
    embed(loaded, [plain], tmp_path / "none")
    assert np.load(tmp_path / "none" / "captions.npy").shape == (0, 8)


@pytest.mark.nightly
def test_one_and_two_ranks_write_the_same_files(model_folder, scene_shards, tmp_path):
    command = ["embed", "--model", str(model_folder), "--shards", str(scene_shards), "--batch", "4"]
    assert main([*command, "--out", str(tmp_path / "1")]) == 0
    first, second = launch(2, ["-m", "evaluation", *command, "--out", str(tmp_path / "2")])
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "21 images" in first.stdout
    for out in ("1", "2"):
        assert sorted(file.name for file in (tmp_path / out).iterdir()) == list(NAMES)
    for name in NAMES:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


def test_parts_of_ranks_are_joined_in_their_order(tmp_path, monkeypatch):
    only_first = lambda self, count, work: [work(0)] if self.first else [None]  # noqa: E731
    monkeypatch.setattr(ProcessGroup, "map_blocks", only_first)
    arguments = (tmp_path / "out", 2, "float32")
    ranks = [FeatureFiles(*arguments, ProcessGroup(rank, 3)) for rank in range(3)]
    for number, one in enumerate(ranks[:2]):
        for step in range(2):
            value = 10 * number + step
            first = one.add("images", np.full((2, 2), value), [{"n": value}, {"n": value}])
            assert first == 2 * step
            one.add("captions", np.full((1, 2), value), [{"images": first + 1}])
    ranks[0]._merge([one._rows for one in ranks])
    images = np.load(tmp_path / "out" / "images.npy")[:, 0]
    assert images.tolist() == [0, 0, 1, 1, 10, 10, 11, 11]
    captions = read_lines(tmp_path / "out" / "captions.jsonl")
    assert [row["images"] for row in captions] == [1, 3, 5, 7]
    assert not (tmp_path / "out.tmp").exists()


SLOW = """
import sys, time
import evaluation.embed
from evaluation.__main__ import main
decode = evaluation.embed.decode_image
def slow(*arguments):
    time.sleep(0.2)
    return decode(*arguments)
evaluation.embed.decode_image = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_a_killed_run_leaves_no_folder_and_the_next_one_ends_well(
    model_folder, scene_shards, tmp_path
):
    out = tmp_path / "out"
    command = ["embed", "--model", str(model_folder), "--shards", str(scene_shards)]
    command += ["--batch", "2", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *command], cwd=ROOT, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    part = tmp_path / "out.tmp" / "images.0.raw"
    for _ in range(3000):
        if part.is_file() and part.stat().st_size:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert part.is_file()
    assert not out.exists()
    assert main(command) == 0
    assert len(np.load(out / "images.npy")) == 21
    assert not (tmp_path / "out.tmp").exists()


def test_shards_without_a_usable_image(model_folder, tmp_path):
    shards = write_shards(tmp_path / "bad", [(b"", Annotation(caption="a"))])
    with pytest.raises(EvaluationError, match=r"no image could be used; the first: unreadable"):
        embed(vlp.load(model_folder), [shards], tmp_path / "out")
    assert not (tmp_path / "out").exists()
