"""The list of answers that a question-answering model chooses from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from vlp.config import ConfigError
from vlp.data.schema import Question
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_index import ShardIndex
from vlp.io import parse_json


def answers_of(question: Question) -> dict[str, int]:
    """Count the people who gave each answer; blank answers do not count."""
    said: Counter[str] = Counter()
    for one in question.answers:
        if one.answer.strip() and one.count > 0:
            said[one.answer.strip()] += one.count
    return dict(said)


def frequent_answers(folders: Sequence[str | Path], most: int) -> tuple[str, ...]:
    """Return the most frequent answers of shards, the most frequent first.

    Raises:
        ConfigError: a folder cannot be read, or nobody answered anything in it.
    """
    said: Counter[str] = Counter()
    for folder in folders:
        index = ShardIndex.open(folder)
        for shard, entry in enumerate(index.shards):
            for sample in range(entry.samples):
                try:
                    annotation = index.read_annotation(shard, sample)
                except BadSample:  # counted when it is trained on
                    continue
                for question in annotation.questions or ():
                    said.update(answers_of(question))
    if not said:
        raise ConfigError(
            f"{', '.join(map(str, folders))}: no question in these shards is answered"
        )
    by_count = sorted(said, key=lambda answer: (-said[answer], answer))
    return tuple(by_count[:most])


def read_answers(file: str | Path) -> tuple[str, ...]:
    """Read a file of answers, a JSON list or one a line, without blank and repeated ones.

    The published list of 3,129 for VQA v2 begins with a blank one.

    Raises:
        ConfigError: the file cannot be read, is no list of texts, or holds no answer.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
        listed = parse_json(text) if path.suffix == ".json" else text.splitlines()
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: this list of answers cannot be read ({error})") from error
    if not isinstance(listed, list) or not all(isinstance(answer, str) for answer in listed):
        raise ConfigError(f"{path}: a list of answers is a JSON list of texts, or a text a line")
    found = _distinct(listed)
    if not found:
        raise ConfigError(f"{path}: this list of answers is empty")
    return found


def _distinct(answers: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer.strip() for answer in answers if answer.strip()))
