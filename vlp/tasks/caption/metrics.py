"""BLEU, ROUGE-L, CIDEr, METEOR and SPICE by pycocoevalcap: from 0 to 1, CIDEr to 10."""

from __future__ import annotations

import importlib
import os
import shutil
import string
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class CaptionToolError(RuntimeError):
    """Error for a missing or failing tool of the caption metrics; the message says what to do."""


class CaptionScores(NamedTuple):
    """Scores by metric: bleu1 to bleu4, rouge_l, cider and, with Java, meteor."""

    corpus: dict[str, float]
    # (captions,) each, without BLEU, which is defined for a corpus.
    per_caption: dict[str, NDArray[np.float64]]


def require_caption_tools(java: bool = True) -> None:
    """Require pycocoevalcap, and with `java` also Java, before a long run needs them."""
    try:
        importlib.import_module("pycocoevalcap")
    except ImportError as error:
        raise CaptionToolError(
            "caption metrics need the package pycocoevalcap: pip install pycocoevalcap"
        ) from error
    if java and shutil.which("java") is None:
        raise CaptionToolError(
            "METEOR and the PTB tokeniser need Java, and there is no `java` on the path: install "
            "it (apt-get install openjdk-17-jre-headless), or evaluate without both"
        )


def caption_scores(
    candidates: Sequence[str], references: Sequence[Sequence[str]], java: bool = True
) -> CaptionScores:
    """Compare captions with the references of people.

    Args:
        candidates: (captions,); an empty caption scores 0.
        references: one or more texts for each candidate.
        java: whether to tokenise by COCO's PTB tokeniser and to compute METEOR, which need Java.
            Else drop ASCII punctuation and split at blanks. Both lower the case.
    """
    _require_pairs(candidates, references)
    if empty := [n for n, texts in enumerate(references) if not any(map(str.strip, texts))]:
        raise ValueError(f"caption {empty[0]} ({candidates[empty[0]]!r}) has no reference")
    require_caption_tools(java)
    with _english_java():
        predicted = _tokenise([[candidate] for candidate in candidates], java)
        target = _tokenise(references, java)
    # Tokenisers empty a reference of punctuation alone; the scorers need at least one reference.
    target = {n: [text for text in texts if text] or [""] for n, texts in target.items()}
    if not any(map(any, target.values())):
        raise ValueError(f"no reference has a word, such as {references[0]!r}")
    bleu = _module("bleu.bleu").Bleu(4).compute_score(target, predicted, verbose=0)[0]
    corpus = {f"bleu{n}": float(score) for n, score in enumerate(bleu, start=1)}
    per_caption = {}
    scorers = {"rouge_l": _module("rouge.rouge").Rouge(), "cider": _module("cider.cider").Cider()}
    for name, scorer in scorers.items():
        score, scores = scorer.compute_score(target, predicted)
        corpus[name], per_caption[name] = float(score), np.asarray(scores, dtype=np.float64)
    if java:
        score, scores = _meteor(target, predicted)
        corpus["meteor"], per_caption["meteor"] = float(score), np.asarray(scores, dtype=np.float64)
    return CaptionScores(corpus, per_caption)


def _require_pairs(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if not candidates or len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} captions, but references of {len(references)}")


def _meteor(
    target: Mapping[int, list[str]], predicted: Mapping[int, list[str]]
) -> tuple[float, list[float]]:
    # METEOR reads a line per caption with ||| between fields; the package strips ||| from
    # candidates alone.
    target = {n: [text.replace("|||", " ") for text in texts] for n, texts in target.items()}
    with _english_java():
        scorer = _module("meteor.meteor").Meteor()
    try:
        score, scores = scorer.compute_score(target, predicted)
        return score, scores
    except Exception as error:
        scorer.lock.release()  # else its destructor waits for ever
        scorer.meteor_p.kill()
        message = scorer.meteor_p.stderr.read().decode(errors="replace").strip()
        raise CaptionToolError(f"METEOR gives no figures ({error}): {message}") from error


@contextmanager
def _english_java() -> Iterator[None]:
    # Other locales write "0,5" and lower the case differently.
    name, options = "_JAVA_OPTIONS", "-Duser.language=en -Duser.country=US -Dfile.encoding=UTF-8"
    previous = os.environ.get(name)
    os.environ[name] = f"{previous or ''} {options}".strip()
    try:
        yield
    finally:
        os.environ.pop(name)
        if previous is not None:
            os.environ[name] = previous


def _tokenise(captions: Sequence[Sequence[str]], java: bool) -> dict[int, list[str]]:
    lines = {n: [" ".join(text.split()) for text in texts] for n, texts in enumerate(captions)}
    if not java:
        drop_punctuation = str.maketrans("", "", string.punctuation)
        return {
            n: [" ".join(text.lower().translate(drop_punctuation).split()) for text in texts]
            for n, texts in lines.items()
        }
    # The tokeniser drops trailing empty lines, so an empty caption becomes a full stop.
    rows = {n: [{"caption": text or "."} for text in texts] for n, texts in lines.items()}
    module = _module("tokenizer.ptbtokenizer")
    with _writable_folder(module):
        tokens: dict[int, list[str]] = module.PTBTokenizer().tokenize(rows)
    return tokens


@contextmanager
def _writable_folder(module: Any) -> Iterator[None]:
    # PTB tokeniser and SPICE write into their package's folder. If it is read-only, let them use a
    # temporary folder with links to its files.
    file = Path(module.__file__)
    if os.access(file.parent, os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in file.parent.iterdir():
            (Path(folder) / path.name).symlink_to(path)
        module.__file__ = str(Path(folder) / file.name)
        try:
            yield
        finally:
            module.__file__ = str(file)


PARSER = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")


def spice_scores(
    candidates: Sequence[str], references: Sequence[Sequence[str]]
) -> NDArray[np.float64]:
    """Return SPICE of each caption, an F-score over scene-graph tuples: (captions,), 0 to 1."""
    _require_pairs(candidates, references)
    require_caption_tools()
    module = _module("spice.spice")
    folder = Path(module.__file__).parent / "lib"
    if missing := [name for name in PARSER if not (folder / name).is_file()]:
        raise CaptionToolError(
            f"SPICE needs Stanford CoreNLP 3.6.0: put {' and '.join(missing)} into {folder}, or "
            "let `python -m pycocoevalcap.spice.get_stanford_models` fetch them"
        )
    predicted = {n: [" ".join(text.split())] for n, text in enumerate(candidates)}
    target = {n: [" ".join(text.split()) for text in texts] for n, texts in enumerate(references)}
    with _english_java(), _writable_folder(module):
        _, scores = module.Spice().compute_score(target, predicted)
    # A caption without tuples against references without tuples gives 0 / 0.
    return np.nan_to_num(np.array([score["All"]["f"] for score in scores], dtype=np.float64))


def _module(name: str) -> Any:
    return importlib.import_module(f"pycocoevalcap.{name}")
