import shutil
import subprocess
import sys

import pytest

from data_tools.__main__ import main
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.text.tokenizer import TextProcessor
from vlp.lock import FolderLock


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    with ShardWriter(folder, 3) as writer:
        for number in range(7):
            captions = [] if number == 5 else [f"a dog number {number}", "a cat runs"]
            writer.write(f"k{number}", b"image", "png", Annotation(captions=captions))
    return folder


def test_vocabulary(shards, tmp_path, capsys):
    (shards / "shard-000002.tar").write_bytes(b"")  # one sample can no longer be read
    arguments = ["vocabulary", "--shards", str(shards), str(shards), "--size", "60"]
    assert main([*arguments, "--out", str(tmp_path / "words")]) == 0
    text = TextProcessor.load(tmp_path / "words", 12)
    assert text.pieces("A dog runs") == ["[CLS]", "a", "dog", "runs", "[SEP]"]
    assert text.vocab_size <= 60
    assert main([*arguments[:-1], "9", "--out", str(tmp_path / "few")]) == 2
    assert "too small" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full/tokenizer.json").symlink_to("/dev/full")
    assert main([*arguments, "--out", str(tmp_path / "full")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/full: cannot be written completely ([Errno 28]" in error


def test_vocabulary_of_everything_that_is_said(tmp_path):
    said = {
        "caption": "aa bb", "hypothesis": "cc dd", "statement": "ee ff",
        "questions": [{"id": "1", "question": "gg hh", "answers": [{"answer": "ii", "count": 2}]}],
        "expressions": [{"id": "2", "text": "jj kk", "box": [0, 0, 1, 1]}],
    }  # fmt: skip
    with ShardWriter(tmp_path / "shards", 4) as writer:
        for number in range(4):
            annotation = Annotation.model_validate(said)
            writer.write(f"k{number}", b"image", "png", annotation)
    arguments = ["vocabulary", "--shards", str(tmp_path / "shards"), "--size", "60"]
    for texts, known in (("captions", 2), ("all", 11)):
        assert main([*arguments, "--texts", texts, "--out", str(tmp_path / texts)]) == 0
        text = TextProcessor.load(tmp_path / texts, 40)
        words = set(text.pieces("aa bb cc dd ee ff gg hh ii jj kk"))
        assert len([word for word in words if len(word) == 2 and word[0] == word[1]]) == known


@pytest.mark.parametrize(
    "command", ["stats", "peek", "dedup", "overlap --evaluation . --pretraining", "vocabulary"]
)
def test_a_file_that_cannot_be_written_is_refused_at_once(command, shards, tmp_path, capsys):
    shutil.copy(shards / "shard-000000.tar", tmp_path / "0.tar")
    options = ["--size", "60", "--shards"] if command == "vocabulary" else []
    other = "0.tar" if command == "vocabulary" else "."  # a file for a folder, or the reverse
    for out, problem in ((other, "; name a f"), ("0.tar/x", "is no writable folder")):
        arguments = [*command.split(), *options, str(tmp_path), "--out", str(tmp_path / out)]
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert problem in said
        assert "%" not in said  # no work was begun


def test_the_tools_do_not_wait_for_pytorch():
    probe = (
        "import sys, data_tools.verify, data_tools.converters.captions;"
        " print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


def test_no_command_writes_into_a_folder_that_another_one_writes(shards, tmp_path, capsys):
    out = tmp_path / "out"
    for folder, arguments in (
        (out, ["scenes", "--train", "8", "--val", "0", "--out", str(out)]),
        (out, ["reshard", str(shards), "--samples-per-shard", "3", "--out", str(out)]),
        (shards, ["index", str(shards)]),
    ):
        with FolderLock(folder):
            before = {path: path.read_bytes() for path in folder.iterdir()}
            assert main(arguments) == 2
            assert "is being written" in capsys.readouterr().err
            assert {path: path.read_bytes() for path in folder.iterdir()} == before
