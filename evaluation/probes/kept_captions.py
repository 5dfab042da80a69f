"""Named words whose caption numbers count the captions that a model reads."""

from __future__ import annotations

from evaluation.samples import CaptionedSample
from vlp.data.schema import caption_numbers
from vlp.data.shards.sample_files import SkippedSample


def count_kept_captions(
    sample: CaptionedSample | SkippedSample,
) -> CaptionedSample | SkippedSample:
    """Return a sample without its blank captions, its words counted among the others.

    One with a word of a caption that is blank, or not there, is a bad annotation.
    """
    if isinstance(sample, SkippedSample) or sample.annotation.words is None:
        return sample
    annotation = sample.annotation
    kept = caption_numbers(annotation)
    words = []
    for word in sample.annotation.words:
        if word.caption not in kept:
            place = f"{'/'.join(sample.identity)}: word {word.word!r} of caption {word.caption}"
            return SkippedSample("bad annotation", f"{place}, which is blank or not there")
        words.append(word.model_copy(update={"caption": kept.index(word.caption)}))
    counted = annotation.model_copy(update={"captions": sample.captions, "words": words})
    return sample._replace(annotation=counted)
