import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from raw_images import files_of, raw_image

from data_tools.__main__ import main
from data_tools.builder import write_shard as shard_job
from data_tools.builder.build import BuildOptions, Fault, SampleSpec, build_in_steps
from data_tools.builder.write_shard import Journal
from data_tools.originals import Originals
from vlp.config import ConfigError
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.sample_files import contents
from vlp.data.shards.shard_reader import ShardIndex

FOUR = BuildOptions(samples_per_shard=4, processes=1)


def wanted(number, **more):
    about = {"caption": f"image {number}", "source": "toy", "image_id": f"i{number}"} | more
    return SampleSpec(f"k{number:03d}", (f"{number}.jpg",), Annotation(**about))


def interrupted(count):
    yield from map(wanted, range(count))
    raise KeyboardInterrupt


@pytest.fixture
def places(tmp_path):
    """Twenty images; 3 and 9 are missing, 6 is cut."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for number in range(20):
        if number not in (3, 9):
            data = raw_image(number)
            (folder / f"{number}.jpg").write_bytes(data[:-200] if number == 6 else data)
    return folder


def build_shards(*arguments, **options):
    *_, manifest = build_in_steps(*arguments, **{"total": None, "arguments": {}, **options})
    return manifest


def build(places, out, options=FOUR, samples=None):
    samples = list(map(wanted, range(20))) if samples is None else samples
    return build_shards(samples, Originals([places]), out, options, title="Toy")


def keys_of(folder):
    index = ShardIndex.open(folder)
    return [
        [index.read(number, sample).key for sample in range(entry.samples)]
        for number, entry in enumerate(index.shards)
    ]


def failures_of(manifest):
    return {kind: failed["ids"] for kind, failed in manifest["failures"].items()}


def test_shards_hold_what_was_wanted_and_the_manifest_what_failed(places, tmp_path):
    out = tmp_path / "out"
    samples = [
        Fault("torn page", "page 7"),
        *map(wanted, range(12)),
        wanted(2),
        wanted(13)._replace(key="a.b"),
        wanted(13)._replace(key="a/b"),
        wanted(13)._replace(key="caf\udce9"),
        wanted(14, caption=" "),
    ]
    manifest = build(places, out, replace(FOUR, licence="of toys"), samples)
    # Four of a shard are there; the fifth of the first one is missing.
    assert keys_of(out) == [
        ["k000", "k001", "k002", "k004"],
        ["k005", "k007", "k008"],
        ["k010", "k011"],
    ]
    assert failures_of(manifest) == {
        "bad key": ["a.b", "a/b", r"caf\xe9"],
        "duplicate key": ["k002"],
        "missing image": ["k003", "k009"],
        "no text": ["k014"],
        "torn page": ["page 7"],
        "unreadable image": ["k006"],
    }
    first = ShardIndex.open(out).read(0, 1)
    assert first.image == raw_image(1)
    assert captions_of(first.annotation) == ["image 1"]
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert (manifest["samples"], manifest["captions"]) == (9, 9)
    assert (manifest["title"], manifest["licence"]) == ("Toy", "of toys")
    for shard in manifest["shards"]:
        data = (out / shard["name"]).read_bytes()
        assert shard["bytes"] == len(data)
        assert shard["sha256"] == hashlib.sha256(data).hexdigest()


def test_a_killed_worker_ends_the_build(places, tmp_path, monkeypatch):
    prepare = shard_job.prepare_image

    def killed(data, where, *rest):
        if where == "17.jpg":
            assert multiprocessing.parent_process() is not None
            os.kill(os.getpid(), signal.SIGKILL)
        return prepare(data, where, *rest)

    options = replace(FOUR, processes=2)
    with monkeypatch.context() as patch:
        patch.setattr(shard_job, "prepare_image", killed)
        with pytest.raises(ConfigError, match="a process died at"):
            build(places, tmp_path / "out", options)
    assert not list((tmp_path / "out").glob("*.tmp"))
    build(places, tmp_path / "out", options)
    build(places, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_full_disk_keeps_what_is_finished(tmp_path, places, monkeypatch):
    # Sizes of files are limited, as nothing else of a disk can be here: the third shard is larger.
    large = tmp_path / "large"
    large.mkdir()
    for number in range(20):
        data = raw_image(number, (24, 16) if number < 8 else (300, 200), "png")
        (large / f"{number}.jpg").write_bytes(data)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot be written .*run the same command again"):
            build(large, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "build.jsonl",
        "shard-000000.tar",
        "shard-000001.tar",
    ]
    build(large, tmp_path / "out")
    build(large, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_take_down_changes_only_the_shards_that_held_a_sample(places, tmp_path):
    samples = [wanted(number, url=f"http://x.org/{number}#a") for number in range(20)]
    said = tmp_path / "take_down.txt"
    said.write_text("# asked for on Monday\n\nk005\ni17 # by image id\nhttp://x.org/16#a\nnobody\n")
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    build(places, out, samples=samples)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    for path in places.iterdir():  # the originals are gone; what is stored is enough
        path.rename(tmp_path / path.name)
    manifest = build(places, out, replace(FOUR, take_down=said), samples)
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert {name for name in before if before[name] != after[name]} == {
        "shard-000001.tar",
        "shard-000003.tar",
    }
    assert failures_of(manifest)["taken down"] == ["k005", "k016", "k017"]
    assert manifest["take_down_without_a_sample"] == ["nobody"]
    for path in tmp_path.glob("*.jpg"):
        path.rename(places / path.name)
    build(places, fresh, replace(FOUR, take_down=said), samples)
    assert files_of(out) == files_of(fresh)
    # Taken off the list, they come back from the originals.
    build(places, tmp_path / "all", samples=samples)
    build(places, out, samples=samples)
    assert files_of(out) == files_of(tmp_path / "all")


def test_a_shard_whose_samples_are_all_taken_down_goes(places, tmp_path):
    said = tmp_path / "take_down.txt"
    said.write_text("k000\nk001\nk002\nk004\n")
    build(places, tmp_path / "out")
    build(places, tmp_path / "out", replace(FOUR, take_down=said))
    names = [entry.name for entry in ShardIndex.open(tmp_path / "out").shards]
    assert names[0] == "shard-000001.tar"
    said.write_text("".join(f"k{number:03d}\n" for number in range(20)))
    manifest = build(places, tmp_path / "out", replace(FOUR, take_down=said))
    assert (manifest["samples"], manifest["shards"]) == (0, [])
    assert not (tmp_path / "out" / "index.npz").exists()
    assert not list((tmp_path / "out").glob("*.tar"))


def test_what_arrives_later_fills_shards_like_the_others(places, tmp_path):
    """As when a list is downloaded in parts: what was not there yet is one long piece."""
    out = tmp_path / "out"
    for number in range(6, 20):
        (places / f"{number}.jpg").unlink(missing_ok=True)
    build(places, out)
    assert [len(keys) for keys in keys_of(out)] == [4, 1]
    for number in range(3, 17):
        (places / f"{number}.jpg").write_bytes(raw_image(number))
    again = build(places, out, replace(FOUR, retry=True))
    # The one that was missing among others joins them.
    assert [len(keys) for keys in keys_of(out)] == [5, 4, 4, 4]
    assert failures_of(again) == {"missing image": ["k017", "k018", "k019"]}
    whole = files_of(out)
    for retry in (False, True, False):
        assert build(places, out, replace(FOUR, retry=retry)) == again
        assert files_of(out) == whole


def test_a_changed_annotation_changes_its_shard(places, tmp_path):
    out = tmp_path / "out"
    build(places, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    samples = [wanted(number) for number in range(20)]
    samples[12] = wanted(12, caption="said better")
    build(places, out, samples=samples)
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert [name for name in sorted(before) if before[name] != after[name]] == ["shard-000002.tar"]
    build(places, tmp_path / "whole", samples=samples)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("length", [18, 14, 5, 1, 0])
def test_a_shorter_list_is_refused_and_nothing_is_touched(places, tmp_path, length):
    out = tmp_path / "out"
    build(places, out)
    (places / "3.jpg").write_bytes(raw_image(3))
    whole = files_of(out)
    # Its first shard is another one, by a caption and by an image to try again.
    shorter = [wanted(0, caption="said better"), *map(wanted, range(1, 20))][:length]
    for retry in (False, True):
        with pytest.raises(ConfigError, match=r"shard-00000\d.tar: .*this (list|one) .*--replace"):
            build(places, out, replace(FOUR, retry=retry), shorter)
        assert files_of(out) == whole


def test_replaced_shards_stay_aside_until_the_new_ones_are_whole(places, tmp_path):
    out, shorter = tmp_path / "out", [wanted(number) for number in range(10)]
    build(places, out)
    old = files_of(out)
    (out / "notes.txt").write_text("kept")
    (out / "samples-of-mine.npy").write_text("kept")
    options = replace(FOUR, replace=True, max_side=20)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            build(places, out, options, interrupted(6))
        aside = files_of(out / ".replaced-000")
        assert {name: data for name, data in aside.items() if name in old} == old
        assert (out / "shard-000000.tar").exists()
    # Another command has its own place for what it finds.
    with pytest.raises(KeyboardInterrupt):
        build(places, out, replace(options, max_side=10), interrupted(6))
    assert files_of(out / ".replaced-000") == aside
    assert (out / ".replaced-001" / "shard-000000.tar").exists()
    build(places, out, options, shorter)
    build(places, tmp_path / "new", options, shorter)
    kept = {"notes.txt": b"kept", "samples-of-mine.npy": b"kept"}
    assert files_of(out) == files_of(tmp_path / "new") | kept
    # Where nothing can be written, what was there is not given up.
    for path in places.iterdir():
        path.unlink()
    new = files_of(tmp_path / "new")
    assert build(places, out, replace(options, quality=50), shorter)["samples"] == 0
    aside = files_of(out / ".replaced-000")
    assert {name: data for name, data in aside.items() if name in new} == new


def test_a_damaged_or_lost_shard_is_made_again(places, tmp_path):
    out = tmp_path / "out"
    build(places, out)
    whole = files_of(out)
    (out / "shard-000000.tar").unlink()
    (out / "shard-000002.tar").write_bytes(whole["shard-000002.tar"][:-512])
    build(places, out)
    assert files_of(out) == whole


@pytest.mark.parametrize("ends", ["announced", "in place", "announced twice"])
def test_killed_while_a_shard_is_replaced(places, tmp_path, monkeypatch, ends):
    """Whether the new file, a longer one, was in place already, its sha256 tells."""
    out, retry = tmp_path / "out", replace(FOUR, retry=True)
    build(places, out)
    shutil.copytree(out, tmp_path / "whole")
    before = files_of(out)
    for number in (3, 9):
        (places / f"{number}.jpg").write_bytes(raw_image(number))
    whole = build(places, tmp_path / "whole", retry)
    add = Journal.add

    def killed(*arguments):
        if ends != "in place":
            add(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if ends == "in place":
            patch.setattr("data_tools.builder.build.sync_path", killed)
        else:
            patch.setattr(Journal, "add", killed)
        for _ in range(2 if ends == "announced twice" else 1):
            with pytest.raises(KeyboardInterrupt):
                build(places, out, retry)
    if ends == "in place":
        assert keys_of(tmp_path / "whole")[0] == ["k000", "k001", "k002", "k003", "k004"]
    else:
        (tmp_path / "away").mkdir()
        build(tmp_path / "away", out)  # nothing has to be read
        assert files_of(out) == before
    assert build(places, out, retry) == whole
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_line_cut_off_in_the_journal_is_that_of_a_kill(places, tmp_path):
    out = tmp_path / "out"
    build(places, out)
    whole = files_of(out)
    path = out / "build.jsonl"
    for cut in (1, 40):
        path.write_bytes(whole["build.jsonl"][:-cut])
        build(places, out)
        assert files_of(out) == whole
    # Cut off within the first line, no shard can have been there.
    for name in whole:
        if name != "build.jsonl":
            (out / name).unlink()
    path.write_bytes(whole["build.jsonl"][:10])
    with pytest.raises(KeyboardInterrupt):
        build(places, out, samples=interrupted(1))
    with pytest.raises(ConfigError, match="was begun with"):
        build(places, out, replace(FOUR, quality=50))
    build(places, out)
    assert files_of(out) == whole


def test_other_settings_and_other_peoples_shards_are_refused(places, tmp_path):
    out = tmp_path / "out"
    build(places, out)
    with pytest.raises(ConfigError, match="was begun with max_side None, this command says 8"):
        build(places, out, replace(FOUR, max_side=8))
    with pytest.raises(ConfigError, match="was begun with data_set Toy, this command says Other: "):
        build_shards([wanted(0)], Originals([places]), out, FOUR, title="Other")
    named = partial(build_shards, [wanted(0)], Originals([places]), tmp_path / "words", FOUR)
    named(title="Toy", arguments={"words": 5})
    with pytest.raises(ConfigError, match="was begun with words 5, this command says 6: "):
        named(title="Toy", arguments={"words": 6})
    (out / "theirs.tar").write_bytes(b"")
    for options in (FOUR, replace(FOUR, replace=True)):
        with pytest.raises(ConfigError, match=r"theirs.tar: a shard that this command did not"):
            build(places, out, options)
    assert (out / "shard-000000.tar").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "shard-000000.tar").write_bytes(b"")
    for options in (FOUR, FOUR, replace(FOUR, replace=True)):
        # the first one leaves nothing that lets the second one in
        with pytest.raises(ConfigError, match="did not write"):
            build(places, other, options)
    assert [path.name for path in other.iterdir()] == ["shard-000000.tar"]

    def damaged():
        yield wanted(0)
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    with pytest.raises(UnicodeDecodeError):
        build(places, tmp_path / "new", samples=damaged())
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match=r"cannot be written .Not a directory"):
        build(places, places / "1.jpg" / "out")


ROOT = Path(__file__).parents[3]


@pytest.fixture
def command(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    images = []
    photos = [raw_image(number, (480, 360)) for number in range(3)]
    for number in range(80):
        if number % 17 != 5:
            target = folder / f"{number % 3}-{number}.jpg"
            target.write_bytes(photos[number % 3])
        sentence = {"raw": f"image {number}"}
        name = f"{number % 3}-{number}.jpg"
        images.append({"filename": name, "split": "train", "sentences": [sentence]})
    annotations = tmp_path / "toy.json"
    annotations.write_text(json.dumps({"dataset": "toy", "images": images}))
    places = ["--annotations", str(annotations), "--images", str(folder)]
    return ["flickr8k", *places, "--samples-per-shard", "8", "--max-side", "100"]


def started(command, out, **options):
    full = [sys.executable, "-m", "data_tools", *command, "--processes", "2", "--out", str(out)]
    return subprocess.Popen(full, env=os.environ | {"PYTHONPATH": str(ROOT)}, **options)


def test_killed_again_and_again(command, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert main([*command, "--processes", "1", "--out", str(whole)]) == 0
    chance = random.Random(0)
    finished = []
    for _ in range(3):
        running = started(command, out, stderr=subprocess.DEVNULL)
        wait_for = time.monotonic() + 60
        while not list(out.glob("train/*.tmp")) and time.monotonic() < wait_for:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.15))
        workers = psutil.Process(running.pid).children()
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        for path in out.glob("train/*.tar"):
            assert contents(path).problem is None
            assert path.read_bytes() == (whole / "train" / path.name).read_bytes()
        assert not (out / "train" / "manifest.json").exists()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert all(worker.status() == psutil.STATUS_ZOMBIE for worker in alive)
        finished.append(len(list(out.glob("train/*.tar"))))
    assert finished == sorted(finished)
    assert main([*command, "--processes", "2", "--out", str(out)]) == 0
    assert files_of(out) == files_of(whole)


def test_ctrl_c(command, tmp_path):
    out = tmp_path / "out"
    running = started(command, out, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for = time.monotonic() + 60
    while not list(out.glob("train/*.tar")) and time.monotonic() < wait_for:
        time.sleep(0.005)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "run the same command again to go on" in said
    assert "Traceback" not in said
    assert not list(out.rglob("*.tmp"))
    assert list(out.glob("train/*.tar"))
