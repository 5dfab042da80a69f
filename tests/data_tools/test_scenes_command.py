import io

import pytest
from PIL import Image
from raw_images import files_of

from data_tools.__main__ import load
from data_tools.scenes import make_sample
from vlp.command_line import Command
from vlp.config import ConfigError
from vlp.data.schema import captions_of
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.text.word_boxes import words_with_boxes
from vlp.scenes.negatives import sample_swap, swap_kinds
from vlp.scenes.sample import MAX_VARIETY, sample_scene


def _run(out, *options):
    command = load("scenes")
    words = ["--out", str(out), "--samples-per-shard", "8", *options]
    return Command.invoke(command, command.make_context("scenes", words)) or 0


def test_every_part_is_written_and_reads_back(tmp_path):
    options = ["--train", "20", "--val", "9", "--unseen", "3", "--swaps", "3"]
    more = ["--nlvr2", "3", "--snli-ve", "3", "--twins", "6"]
    assert _run(tmp_path, *options, *more) == 0
    sizes = {"train": 20, "val": 9, "unseen": 3, "swaps": 3, "nlvr2": 3, "snli_ve": 3}
    sizes["twins"] = 6
    for part, size in sizes.items():
        index = ShardIndex.open(tmp_path / part)
        assert sum(shard.samples for shard in index.shards) == size
        first = index.read(0, 0)
        assert first.key == f"{part}-0-0"
        image = Image.open(io.BytesIO(first.image))
        assert image.size == (64, 64)
        assert (first.second_image is not None) == (part in ("swaps", "nlvr2"))
    stored = ShardIndex.open(tmp_path / "train").read(2, 1)
    assert stored.key == "train-0-17"
    assert stored.annotation.boxes == [list(obj.box) for obj in sample_scene(0, 17).objects]
    assert len(captions_of(stored.annotation)) == 5


def test_twins_follow_each_other(tmp_path):
    _run(tmp_path, "--train", "0", "--val", "0", "--twins", "12")
    index = ShardIndex.open(tmp_path / "twins")
    samples = [index.read(*divmod(number, 8)) for number in range(12)]
    kinds = swap_kinds(MAX_VARIETY)
    for number, (scene, twin) in enumerate(zip(samples[::2], samples[1::2])):
        pair = sample_swap(0, number, kinds[number % len(kinds)], "train")
        assert captions_of(scene.annotation) == [pair.caption.text]
        assert captions_of(twin.annotation) == [pair.foil.text]
        assert scene.annotation.image_id != twin.annotation.image_id
        assert scene.image != twin.image
        objects = 1 if pair.kind == "place" else 2
        assert len(words_with_boxes(twin.annotation)) == 2 * objects


def test_kinds_of_swaps_can_be_chosen(tmp_path):
    options = ["--train", "0", "--val", "0", "--kinds", "distance", "binding"]
    _run(tmp_path, *options, "--swaps", "4", "--twins", "4")
    swaps = ShardIndex.open(tmp_path / "swaps")
    kinds = [swaps.read(0, number).annotation.scene["swap"]["kind"] for number in range(4)]
    assert kinds == ["distance", "binding"] * 2
    near = captions_of(ShardIndex.open(tmp_path / "twins").read(0, 0).annotation)[0]
    assert set(near.replace(",", "").split()) & {"close", "together", "apart", "distant"}
    with pytest.raises(ConfigError, match="this command"):
        _run(tmp_path, "--train", "0", "--val", "0", "--swaps", "4")  # other kinds
    with pytest.raises(ConfigError, match="--objects 2 or more"):
        _run(tmp_path / "one", "--objects", "1", "--kinds", "distance")


def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    _run(whole, "--train", "30", "--val", "5")

    def interrupted(part, seed, image_size, index, **options):
        if index == 19:
            raise KeyboardInterrupt
        return make_sample(part, seed, image_size, index, **options)

    with monkeypatch.context() as patch:
        patch.setattr("data_tools.scenes.make_sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _run(broken, "--train", "30", "--val", "5")
    assert len(list((broken / "train").glob("*.tar"))) == 2
    _run(broken, "--train", "30", "--val", "5")
    assert files_of(broken) == files_of(whole)


def test_shards_of_others_are_refused_and_stay(tmp_path):
    other = tmp_path / "train" / "shard-000000.tar"
    other.parent.mkdir()
    other.write_bytes(b"theirs")
    with pytest.raises(ConfigError, match=r"shard-000000.tar: a shard that `scenes` did not write"):
        _run(tmp_path, "--train", "8", "--val", "0")
    assert files_of(tmp_path) == {"train/shard-000000.tar": b"theirs"}
