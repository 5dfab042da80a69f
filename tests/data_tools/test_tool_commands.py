from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from data_tools.__main__ import COMMANDS, main
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardIndex, ShardWriter
from vlp.data.text.tokenizer import TextProcessor


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    with ShardWriter(folder, 3) as writer:
        for number in range(7):
            captions = [] if number == 5 else [f"a dog number {number}", "a cat runs"]
            writer.write(f"k{number}", b"image", "png", Annotation(captions=captions))
    return folder


def test_index(shards: Path, capsys: pytest.CaptureFixture) -> None:
    written = (shards / "index.npz").read_bytes()
    (shards / "index.npz").unlink()
    assert main(["index", str(shards)]) == 0
    assert (shards / "index.npz").read_bytes() == written
    printed = capsys.readouterr().out
    assert "3 shards, 7 samples, 12 captions" in printed
    assert "1 samples have no caption" in printed


def test_index_names_empty_and_damaged_shards(shards: Path, capsys: pytest.CaptureFixture) -> None:
    with tarfile.open(shards / "empty.tar", "w"):
        pass
    assert main(["index", str(shards)]) == 0
    path = shards / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:1000])
    assert main(["index", str(shards)]) == 1
    printed = capsys.readouterr().out
    assert "empty.tar: empty" in printed
    assert "shard-000001.tar: not a readable tar from here on (unexpected end" in printed
    assert len(ShardIndex.open(shards)) < 7


def test_index_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["index", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["index", str(tmp_path)]) == 2
    assert "holds no shards" in capsys.readouterr().err


def limited(size: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command that may write so many bytes of a file, as on a disk that is full then."""
    program = (
        "import resource, signal, sys; from data_tools.__main__ import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_a_full_disk_is_said_plainly(shards: Path, tmp_path: Path) -> None:
    before = (shards / "index.npz").read_bytes()
    ran = limited(200, "index", shards)
    assert (ran.returncode, ran.stderr.count("Traceback")) == (2, 0)
    # What is kept of finished shards comes first, for the next start.
    assert f"data_tools index: {shards}/.index.tasks/" in ran.stderr
    assert "cannot be written (File too large)" in ran.stderr
    assert (shards / "index.npz").read_bytes() == before
    out = tmp_path / "words"
    # A few bytes of tokenizer.json, a part of it, and vocab.txt is behind it.
    for size in (10, 1000, 3000):
        ran = limited(size, "vocabulary", "--shards", shards, "--size", 60, "--out", out)
        assert (ran.returncode, ran.stderr.count("Traceback")) == (2, 0)
        assert f"data_tools vocabulary: {out}: cannot be written whole (" in ran.stderr
        assert "File too large" in ran.stderr


def test_vocabulary(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (shards / "shard-000002.tar").unlink()  # one sample can no longer be read
    arguments = ["vocabulary", "--shards", str(shards), str(shards), "--size", "60"]
    assert main([*arguments, "--out", str(tmp_path / "words")]) == 0
    text = TextProcessor.load(tmp_path / "words", 12)
    assert text.words("A dog runs") == ["[CLS]", "a", "dog", "runs", "[SEP]"]
    assert text.vocab_size <= 60
    printed = capsys.readouterr().out
    assert "from 20 captions" in printed
    assert "2 samples could not be read" in printed
    assert main([*arguments[:-1], "9", "--out", str(tmp_path / "few")]) == 2
    assert "too small" in capsys.readouterr().err


def test_vocabulary_of_everything_that_is_said(tmp_path: Path) -> None:
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
        words = set(text.words("aa bb cc dd ee ff gg hh ii jj kk"))
        assert len([word for word in words if len(word) == 2 and word[0] == word[1]]) == known


def test_unknown_and_missing_commands(capsys: pytest.CaptureFixture) -> None:
    assert main(["flikr8k"]) == 2
    assert "did you mean flickr8k?" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name in COMMANDS:
        assert name in printed


def test_the_tools_do_not_wait_for_pytorch() -> None:
    probe = (
        "import sys, data_tools.verify, data_tools.converters.captions;"
        " print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    assert f"python -m data_tools {name}" in capsys.readouterr().out


def test_as_a_module(shards: Path) -> None:
    command = [sys.executable, "-m", "data_tools", "index", str(shards)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0
    assert "7 samples" in done.stdout
