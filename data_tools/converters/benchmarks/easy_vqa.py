"""easy-VQA to shards: one sample an image of one shape, with all its questions.

--questions takes {train,test}_questions.json, a list of [question, answer, image's number];
--images the images of the same split, <number>.png. With --answers (answers.txt) a question with
an answer that is not in it is left out and counted. The data has no question ids: a question's
place in the file (from 0) is its id. Its one answer counts as given by ten people.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from data_tools.builder.options import add_build_arguments
from data_tools.builder.sample_spec import Refused
from data_tools.converters.benchmarks.questions import ImageQuestions, lone_answer, write_questions
from data_tools.sources.annotation_rows import Faults, json_list, text_lines
from vlp.config import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--questions", type=Path, required=True, help="questions of one split")
    parser.add_argument("--answers", type=Path, help="answers.txt, one a line")
    parser.add_argument(
        "--split", default="", help="folder of the images in the release: train or test"
    )
    add_build_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert; what is left out is printed and named in the manifest."""
    faults: Faults = []
    known = None if arguments.answers is None else read_answer_list(arguments.answers)
    asked = easy_images(arguments.questions, known, arguments.split, faults)
    return write_questions(arguments, asked, faults, title="easy-VQA", licence="MIT")


def read_answer_list(path: Path) -> frozenset[str]:
    """Return the answers of answers.txt.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    answers = frozenset(line.strip() for line in text_lines(path))
    if not answers:
        raise ConfigError(f"{path}: holds no answers, one a line")
    return answers


def easy_images(
    path: Path, known: frozenset[str] | None, split: str, faults: Faults
) -> list[ImageQuestions]:
    """Return the images that a question file asks about, in the order of their first question.

    Args:
        path: the question file.
        known: the answers that there are; None: any.
        split: folder of the images in the release, or "".
        faults: what is wrong with rows.

    Raises:
        ConfigError: the file cannot be read or is no easy-VQA file.
    """
    images: dict[int, ImageQuestions] = {}
    for number, (where, row) in enumerate(json_list(path)):
        if not _fits(row):
            problem = f"{where}: not [question, answer, image's number]"
            if not images:
                raise ConfigError(f"{problem}; is it the right file?")
            faults.append(Refused("row of another layout", problem))
            continue
        question, answer, image = row
        if known is not None and answer not in known:
            faults.append(Refused("unknown answer", f"{number} ({answer})"))
            continue
        if image not in images:
            folder, prefix = (f"{split}/images/", f"{split}-") if split else ("", "")
            name, image_id = f"{folder}{image}.png", f"{prefix}{image}"
            images[image] = ImageQuestions(name, "easy-vqa", image_id, [], prefix)
        images[image].questions.append(lone_answer(str(number), question, answer))
    return list(images.values())


def _fits(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 3
        and all(isinstance(text, str) and text.strip() for text in row[:2])
        and isinstance(row[2], int)
    )
