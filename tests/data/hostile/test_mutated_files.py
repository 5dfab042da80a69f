"""Mutated files of every kind that the product reads: an error of one sentence, or a skip.

VLP_FUZZ and VLP_FUZZ_SEED say how many and which. What fails is told by its
number: `VLP_FUZZ_ONLY=4711` reads that one alone.
"""

import os
import shutil
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from guard import Hang, guarded
from mutations import mutated
from raw_images import files_of
from readers import READERS

COUNT = int(os.environ.get("VLP_FUZZ", "10000"))
SEED = int(os.environ.get("VLP_FUZZ_SEED", "30"))
ONLY = os.environ.get("VLP_FUZZ_ONLY")
PARTS = 20

_TURNS = [name for name, reader in READERS.items() for _ in range(reader.weight)]


@cache
def good_files(name, variant):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / str(variant)
        folder.mkdir()
        READERS[name].make(folder)
        return files_of(folder)


def targets(name, files):
    pattern = READERS[name].targets
    return [
        file
        for file in files
        if Path(file).match(pattern.removeprefix("**/"))
        and (pattern.startswith("**/") or file.count("/") == pattern.count("/"))
    ]


def attempt(number, folder):
    """Read one mutant; returns what is wrong with the outcome, if anything."""
    rng = np.random.default_rng((SEED, number))
    name = _TURNS[int(rng.integers(len(_TURNS)))]
    reader = READERS[name]
    files = good_files(name, int(rng.integers(12)))
    chosen = targets(name, files)
    target = chosen[int(rng.integers(len(chosen)))]
    other = files[list(files)[int(rng.integers(len(files)))]]
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(mutated(rng, file, content, other) if file == target else content)
    about = f"mutant {number} ({name}, {target})"
    started = time.monotonic()
    try:
        with guarded(folder) as seen:
            try:
                reader.read(folder, files, target)
            except reader.errors as error:
                text = str(error)
                # A configuration has a line for each of its faults.
                listed = name in ("configuration", "model", "checkpoint")
                if not text.strip() or ("\n" in text and not listed):
                    return f"{about}: no sentence, but {type(error).__name__} {text[:500]!r}"
    except Hang as error:
        return f"{about}: {error}"
    except AssertionError as error:
        return f"{about}: a good sample was lost, or more: {error!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{about}: {type(error).__name__} {str(error)[:300]!r}"
    if seen:
        return f"{about}: touched {seen[:3]}"
    seconds = time.monotonic() - started
    return f"{about}: {seconds:.0f} s" if seconds > 20 else None


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_raise_an_error_of_one_sentence_or_are_skipped(part, tmp_path):
    wrong = []
    numbers = range(part, COUNT, PARTS) if ONLY is None else [int(ONLY)] * (part == 0)
    tempfile.tempdir = str(tmp_path)
    try:
        for number in numbers:
            folder = tmp_path / "mutant"
            folder.mkdir()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                problem = attempt(number, folder)
            if problem is not None:
                wrong.append(problem)
            shutil.rmtree(folder)
    finally:
        tempfile.tempdir = None
    assert not wrong, f"{len(wrong)} of {len(numbers)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", READERS)
def test_files_without_mutation_are_read(name, tmp_path):
    files = good_files(name, 0)
    for target in targets(name, files):
        folder = tmp_path / target.replace("/", "-")
        for file, content in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        with guarded(folder) as seen:
            READERS[name].read(folder, files, target)
        assert not seen
