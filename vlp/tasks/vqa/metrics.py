"""VQA accuracy: the share of people who gave the predicted answer (Antol et al. 2015)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

# Two evaluators differ on one question in seven of VQA v2: `official` is the current one of the
# data set's authors, `albef_copy` the older one that ALBEF and its successors report. Their
# treatment of answers is part of the metric, oddities included.
Version = Literal["official", "albef_copy"]

# Number of agreeing people that makes an answer right.
ENOUGH = 3

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)} | {"none": "0"}
_ARTICLES = ("a", "an", "the")
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
# The evaluators hand a flag of value 32 to the argument that limits substitutions.
_PERIODS = 32

_CONTRACTED = {
    "n't": "ai are ca could did does do had has have is might must need ought sha should was were "
    "wo would",
    "'ve": "could couldn't hadn't he'd it'd might mightn't must not she'd should shouldn't "
    "somebody'd someone'd something'd there'd they they'd we we'd what where who who'd would "
    "wouldn't y'all'd you you'd",
    "'d": "he how it someone something there they where who you",
    "'ll": "how it somebody someone something they what who why y'all you",
    "'re": "there they what why you",
    "'s": "he how somebody someone that there what when where who why",
}
_FORMS = [stem + end for end, stems in _CONTRACTED.items() for stem in stems.split()]
_FORMS += ["ma'am", "o'clock", "'twas", "y'all", "'ow's'at"]


def _missing_apostrophe(form: str) -> list[str]:
    positions = [position for position, letter in enumerate(form) if letter == "'"]
    return [form[:position] + form[position + 1 :] for position in positions]


# A form without one of its apostrophes gets it; the backward entry is the evaluators'.
_APOSTROPHES = {lacking: form for form in _FORMS for lacking in _missing_apostrophe(form)}
_APOSTROPHES["somebody'd"] = "somebodyd"


def normalise_answer(answer: str) -> str:
    """Normalise an answer as the evaluators do.

    In lower case, without articles, number words up to ten as digits, missing apostrophes of
    contractions put back, and punctuation dropped: a mark becomes a blank, or nothing where a blank
    is next to it or the answer has a comma between digits. Colons, apostrophes and periods before a
    digit stay.
    """
    words = (_DIGITS.get(word, word) for word in _without_punctuation(answer).lower().split())
    return " ".join(_APOSTROPHES.get(word, word) for word in words if word not in _ARTICLES)


def vqa_accuracy(
    prediction: str, answers: Iterable[tuple[str, int]], version: Version = "official"
) -> float:
    """Return the score, between 0 and 1, of a predicted answer.

    Each person's answer is left out once; the prediction gets the part of three that agree among
    the others, at most 1, and the mean over persons counts. VQA v2 has ten.

    Args:
        version: `official` normalises prediction and answers unless all people gave the same, and
            ignores case; `albef_copy` always normalises the prediction, and drops only punctuation
            of the answers, where they differ.
    """
    counts = [(_trimmed(answer), count) for answer, count in answers if count > 0]
    people = sum(count for _, count in counts)
    if not people:
        raise ValueError("nobody answered the question, so no answer is right")
    predicted = _trimmed(prediction)
    differ = len({answer for answer, _ in counts}) > 1
    if version == "official":
        if differ:
            counts = [(normalise_answer(answer), count) for answer, count in counts]
            predicted = normalise_answer(predicted)
        counts = [(answer.lower(), count) for answer, count in counts]
        predicted = predicted.lower()
    elif version == "albef_copy":
        predicted = normalise_answer(predicted)
        if differ:
            counts = [(_without_punctuation(answer), count) for answer, count in counts]
    else:
        raise ValueError(f"unknown version {version!r}; one of official, albef_copy")
    agree = sum(count for answer, count in counts if answer == predicted)
    # With fewer than four people, all others have to agree, and with one, that person.
    if people == 1:
        return float(agree)
    enough = min(ENOUGH, people - 1)
    agreeing_score = min(1.0, max(agree - 1, 0) / enough)
    other_score = min(1.0, agree / enough)
    return (agree * agreeing_score + (people - agree) * other_score) / people


def _trimmed(answer: str) -> str:
    return answer.replace("\n", " ").replace("\t", " ").strip()


def _without_punctuation(answer: str) -> str:
    squeeze = _COMMA_IN_NUMBER.search(answer) is not None
    text = answer
    for mark in _PUNCTUATION:
        beside_blank = f"{mark} " in answer or f" {mark}" in answer
        text = text.replace(mark, "" if squeeze or beside_blank else " ")
    return _PERIOD.sub("", text, count=_PERIODS)
