"""Images with human captions to shards: Flickr8k, Flickr30k, COCO, Visual Genome's regions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, Field, ValidationError
from typer import Option

from data_tools.builder.build import CorpusPart, Target, check_splits, make_corpus, stems_of
from data_tools.builder.samples import Fault, SampleSpec, clean_caption, clean_captions, drop_reason
from data_tools.converters.category_words import CategoryWords
from data_tools.options import MAX_WORDS, BuildOptions, File, Images, MaxWords, Out, Splits
from data_tools.rows import (
    Faults,
    LayoutCheck,
    Row,
    SplitName,
    is_utf8,
    list_rows,
    parse_rows,
    read_json,
    streamed_list,
    text_lines,
)
from vlp.config import ConfigError
from vlp.data.boxes import OUTSIDE
from vlp.data.file_names import FileNames
from vlp.data.schema import Annotation, Expression

FLICKR = "Flickr's terms of use; given out by the authors for non-commercial research"
COCO = "annotations CC BY 4.0 (COCO Consortium); images under Flickr's terms of use"
VISUAL_GENOME = "annotations CC BY 4.0; images under Flickr's terms of use"


class Entry(NamedTuple):
    """An image with its raw captions."""

    filename: str
    split: str
    captions: list[str | None]
    source: str
    image_id: str  # within its source
    key: str


class _KarpathyImage(Row):
    filename: str
    split: SplitName
    sentences: list[Any]  # not validated here: a bad sentence is dropped, its image is not
    filepath: str | None = None
    cocoid: Any = None


class _CocoImage(Row):
    id: int
    file_name: str
    coco_url: str | None = None
    flickr_url: str | None = None


class _Caption(Row):
    image_id: int
    caption: str | None


class _Region(Row):
    region_id: str
    phrase: str
    x: float
    y: float
    width: float
    height: float


class _GenomeImage(Row):
    id: int = Field(validation_alias=AliasChoices("id", "image_id"))
    regions: list[Any]


class _GenomeData(Row):
    id: int = Field(validation_alias=AliasChoices("image_id", "id"))
    width: int
    height: int
    coco_id: int | None = None
    flickr_id: int | None = None
    url: str | None = None


def flickr8k(
    annotations: Annotated[list[Path], File(help="Karpathy-style JSON files")],
    images: Images,
    out: Out,
    build: BuildOptions,
    splits: Splits = None,
    max_words: MaxWords = MAX_WORDS,
) -> int:
    """Turn Flickr8k (or anything in Karpathy's layout) and its images into shards.

        vlp data flickr8k --annotations dataset_flickr8k.json \\
            --images Images/ --out shards/flickr8k

    writes OUT/train, OUT/val and OUT/test: tars, index.npz and manifest.json, which lists rows left
    out by reason. An image with all its captions is one sample.
    """
    faults: Faults = []
    entries: list[Entry] = []
    for path in annotations:
        entries += read_karpathy(read_json(path, faults), path, faults)
    target = Target(out, build, "Flickr8k", FLICKR, {"max_words": max_words})
    return make_corpus(target, images, split_parts(entries, splits, max_words, faults))


def flickr30k(
    annotations: Annotated[Path, File(help="dataset_flickr30k.json, or results_20130124.token")],
    images: Images,
    out: Out,
    build: BuildOptions,
    lists: Annotated[
        list[Path] | None, Option(metavar="SPLIT.txt", help="images of each split, for .token")
    ] = None,
    splits: Splits = None,
    max_words: MaxWords = MAX_WORDS,
) -> int:
    """Turn Flickr30k and its images into shards, one folder per split.

        vlp data flickr30k --annotations dataset_flickr30k.json \\
            --images flickr30k-images/ --out shards/flickr30k

    --annotations takes Karpathy's JSON, which has the usual splits, or the official
    results_20130124.token (`IMAGE.jpg#0<TAB>caption`). The .token file needs lists of the images of
    each split (--lists train.txt val.txt test.txt, one image a line), or all go to OUT/all.
    """
    faults: Faults = []
    if annotations.suffix != ".json":
        entries = read_tokens(annotations, lists or [], faults)
    elif lists:
        raise ConfigError("--lists: the JSON has its own splits; leave out --lists")
    else:
        entries = read_karpathy(read_json(annotations, faults), annotations, faults)
    target = Target(out, build, "Flickr30k", FLICKR, {"max_words": max_words})
    return make_corpus(target, images, split_parts(entries, splits, max_words, faults))


def coco(
    annotations: Annotated[list[Path], File(help="Karpathy's JSON, or official captions_*.json")],
    images: Images,
    out: Out,
    build: BuildOptions,
    instances: Annotated[list[Path] | None, File(help="official instances_*.json files")] = None,
    splits: Splits = None,
    max_words: MaxWords = MAX_WORDS,
) -> int:
    """Turn COCO's captions and images into shards, one folder per split.

        vlp data coco --annotations dataset_coco.json --images coco/ --out shards/coco

    --annotations takes Karpathy's dataset_coco.json (train, val, test; `restval` goes to train), or
    the official captions_train2017.json, captions_val2014.json ... (each becomes
    OUT/train2017, OUT/val2014 ...), gzipped or not. --images takes the official zips or folders.

    --instances takes the official instances_*.json of the same images, with official captions.
    Then samples have the boxes of all objects, and words that name a category have its boxes.
    Images are COCO's if their names end in their id, of 12 digits; others get no `source`.
    """
    entries: list[Entry] = []
    parts: list[CorpusPart] = []
    faults: Faults = []
    category_words = CategoryWords(instances, faults) if instances else None
    stems = [path.name.split(".")[0].removeprefix("captions_") for path in annotations]
    for path, stem in zip(annotations, stems):
        file_faults: Faults = []
        content = read_json(path, file_faults)
        if isinstance(content, dict) and "annotations" in content:
            # Export tools give every split's file the same name, in one folder per split.
            name = stem if stems.count(stem) == 1 else path.resolve().parent.name
            if name in [part.name for part in parts]:
                raise ConfigError(f"{path}: another file makes OUT/{name} too; rename one")
            # All parts use --instances, so the manifest of each counts the faults of these files.
            part_faults = [*faults, *file_faults]
            parts += [_official_part(content, path, name, max_words, category_words, part_faults)]
        else:
            faults += file_faults
            entries += read_karpathy(content, path, faults)
    if entries and parts:
        raise ConfigError("--annotations: Karpathy's JSON or official files, not both at once")
    if entries and category_words is not None:
        raise ConfigError(
            "--instances goes with official captions_*.json, not with Karpathy's JSON"
        )
    if entries:
        parts = split_parts(entries, splits, max_words, faults)
    elif splits:
        check_splits(splits, [part.name for part in parts])
        parts = [part for part in parts if part.name in splits]
    settings = {"max_words": max_words, "instances": category_words is not None}
    return make_corpus(Target(out, build, "COCO captions", COCO, settings), images, parts)


def visual_genome(
    regions: Annotated[Path, File(help="region_descriptions.json")],
    images: Images,
    out: Out,
    build: BuildOptions,
    image_data: Annotated[Path | None, File(help="image_data.json, for sizes and ids")] = None,
    max_words: MaxWords = MAX_WORDS,
    min_words: Annotated[int, Option(min=1, metavar="N", help="shorter phrases are left out")] = 1,
    min_area: Annotated[
        float, Option(min=0, max=1, metavar="SHARE", help="of the image; drop smaller regions")
    ] = 0,
    exclude: Annotated[
        list[Path] | None, File(help="image ids of COCO to leave out, one a line")
    ] = None,
) -> int:
    """Turn Visual Genome's regions and images into shards.

        vlp data visual_genome --regions region_descriptions.json \\
            --image-data image_data.json --images VG_100K/ VG_100K_2/ --out shards/visual_genome

    Each region's phrase is a caption, and a referring expression with the region's box. With
    --image-data images of COCO get COCO's identity (`source` coco, `image_id` its number). ALBEF
    keeps 769 k of 5 M phrases by four filters: images of evaluation sets, repeated phrases of an
    image (always left out), small regions, short phrases.
    """
    if image_data is None and (min_area or exclude):
        raise ConfigError("--min-area and --exclude need --image-data: it has sizes and ids")
    excluded = {line.strip() for file in exclude or () for line in text_lines(file)}
    filters = _GenomeFilters(max_words, min_words, min_area, excluded)
    faults: Faults = []
    data: dict[int, _GenomeData] = {}
    if image_data is not None:
        data = {
            row.id: row
            for row in parse_rows(streamed_list(image_data, faults), _GenomeData, faults)
        }
    part = CorpusPart("", _genome_samples(regions, data, faults, filters), len(data) or None)
    settings = {"max_words": max_words, "min_words": min_words, "min_area": min_area}
    if excluded:
        settings["excluded"] = len(excluded)
    target = Target(out, build, "Visual Genome regions", VISUAL_GENOME, settings)
    return make_corpus(target, images, [part])


def _raw_caption(sentence: Any) -> str | None:
    raw = sentence.get("raw") if isinstance(sentence, dict) else None
    return raw if isinstance(raw, str) else None


def read_karpathy(content: Any, path: Path, faults: Faults) -> list[Entry]:
    """Read `{"dataset", "images": [{"filename", "split", "sentences": [{"raw"}]}]}` of a file."""
    images = list(parse_rows(list_rows(content, path, "images"), _KarpathyImage, faults))
    names = [f"{row.filepath}/{row.filename}" if row.filepath else row.filename for row in images]
    stems = stems_of(names)
    return [
        Entry(
            name,
            # `restval`: images of COCO's val2014 to train on
            "train" if image.split == "restval" else image.split,
            [_raw_caption(sentence) for sentence in image.sentences],
            content.get("dataset") or path.stem,
            stems[name] if image.cocoid is None else str(image.cocoid),
            key_of_image(stems[name]),
        )
        for name, image in zip(names, images)
    ]


def read_tokens(path: Path, lists: Sequence[Path], faults: Faults) -> list[Entry]:
    """Read `IMAGE.jpg#NUMBER<TAB>CAPTION` lines; `lists` name the images of each split."""
    captions: dict[str, list[str | None]] = {}
    check = LayoutCheck()
    for number, line in enumerate(text_lines(path), 1):
        name, tab, caption = line.partition("\t")
        image, mark, _ = name.partition("#")
        if tab and mark and is_utf8(line):
            captions.setdefault(image, []).append(caption)
            check.has_good_row = True
        else:
            where = f"{path}, line {number}"
            check.add_bad_row(f"{where}: this should be IMAGE.jpg#NUMBER<TAB>CAPTION")
            faults.append(Fault("line of another layout", where))
    check.finish()
    splits = _listed_splits(lists, captions, faults) if lists else dict.fromkeys(captions, "all")
    stems = stems_of(captions)
    return [
        Entry(image, splits[image], texts, "flickr30k", stems[image], key_of_image(stems[image]))
        for image, texts in captions.items()
        if image in splits
    ]


def _listed_splits(lists: Sequence[Path], images: Iterable[str], faults: Faults) -> dict[str, str]:
    """Return the split (the list's name) of each listed image; unknown images are faults."""
    # Published lists have paths or base names, with or without extension.
    names = FileNames({image: image for image in images})
    splits: dict[str, str] = {}
    for file in lists:
        for line in text_lines(file):
            image = names.find(line.strip())
            if image is None:
                faults.append(Fault("listed image without captions", f"{file}: {line.strip()}"))
            elif splits.setdefault(image, file.stem) != file.stem:
                raise ConfigError(f"{file}: {image} is in the list {splits[image]}, too")
    return splits


def split_parts(
    entries: Sequence[Entry], splits: Sequence[str] | None, max_words: int, faults: Faults
) -> list[CorpusPart]:
    """Return a part, a folder of shards, for each split."""
    available = sorted({entry.split for entry in entries})
    check_splits(splits, available)
    parts: list[CorpusPart] = []
    for split in splits or available:
        selection = [entry for entry in entries if entry.split == split]
        # Faulty rows may have no split, so the first part's manifest counts all of them.
        samples = chain(_entry_samples(selection, max_words), () if parts else faults)
        parts.append(CorpusPart(split, samples, len(selection)))
    return parts


def key_of_image(stem: str) -> str:
    """Return a sample's key: without slashes at its ends.

    Other slashes, backslashes, dots, spaces and what cannot be printed become `_`.
    """
    joined = "_".join(stem.strip("/").split())
    return "".join("_" if c in "./\\" or not c.isprintable() else c for c in joined)


def _entry_samples(entries: Sequence[Entry], max_words: int) -> Iterator[SampleSpec | Fault]:
    for entry in entries:
        key = entry.key
        captions, dropped = clean_captions(entry.captions, key, max_words)
        yield from dropped
        annotation = Annotation(captions=captions, source=entry.source, image_id=entry.image_id)
        yield SampleSpec(key, (entry.filename,), annotation)


def _official_part(
    content: Any,
    path: Path,
    name: str,
    max_words: int,
    category_words: CategoryWords | None,
    faults: Faults,
) -> CorpusPart:
    captions: dict[int, list[str | None]] = {}
    for row in parse_rows(list_rows(content, path, "annotations"), _Caption, faults):
        captions.setdefault(row.image_id, []).append(row.caption)
    images = list(parse_rows(list_rows(content, path, "images"), _CocoImage, faults))
    stems = stems_of(image.file_name for image in images)
    names = {image.id: image.file_name for image in images}
    # Ids of several files: a caption may belong to any of these files.
    ambiguous_ids = {image.id for image in images if names[image.id] != image.file_name}

    def samples() -> Iterator[SampleSpec | Fault]:
        for image in images:
            key = key_of_image(stems[image.file_name])
            if image.id in ambiguous_ids:
                yield Fault("image id of several files", f"{image.id} ({image.file_name})")
                continue
            instances = category_words
            if instances is not None and instances.is_other_file(image.id, image.file_name):
                yield Fault("instances of another image of this id (kept)", f"{image.id}")
                instances = None
            texts, dropped = clean_captions(captions.get(image.id, ()), key, max_words)
            yield from dropped
            # Data sets in COCO's layout, such as VizWiz, number their own images from 0.
            is_coco = PurePosixPath(image.file_name).stem.endswith(f"{image.id:012d}")
            annotation = Annotation(
                captions=texts,
                source="coco" if is_coco else None,
                image_id=str(image.id),
                url=image.coco_url,
                flickr_url=image.flickr_url,
                boxes=None if instances is None else instances.boxes(image.id),
                words=None if instances is None else instances.words(image.id, texts),
            )
            size = None if instances is None else instances.size(image.id)
            yield SampleSpec(key, (image.file_name,), annotation, size)
        for image_id in captions.keys() - {image.id for image in images}:
            yield Fault("captions of an unknown image", str(image_id))
        yield from faults

    return CorpusPart(name, samples(), len(images))


class _GenomeFilters(NamedTuple):
    max_words: int  # of a phrase
    min_words: int
    min_area: float  # of a region, as a share of the image
    excluded: set[str]  # COCO's image ids


def _genome_samples(
    path: Path, image_data: dict[int, _GenomeData], faults: Faults, filters: _GenomeFilters
) -> Iterator[SampleSpec | Fault]:
    for image in parse_rows(streamed_list(path, faults), _GenomeImage, faults):
        key = f"vg-{image.id}"
        data = image_data.get(image.id)
        if data is not None and str(data.coco_id) in filters.excluded:
            yield Fault("image of an evaluation set", key)
            continue
        captions: list[str] = []
        expressions: list[Expression] = []
        for content in image.regions:
            try:
                region = _Region.model_validate(content)
            except ValidationError:
                region_id = content.get("region_id") if isinstance(content, dict) else None
                label = "without an id" if region_id is None else region_id
                yield Fault("region of another layout", f"{key}/region {label}")
                continue
            phrase = clean_caption(region.phrase)
            reason = drop_reason(phrase, filters.max_words)
            if reason is None and len(phrase.split()) < filters.min_words:
                reason = "shorter than --min-words"
            min_pixels = filters.min_area * data.width * data.height if data else 0
            if reason is None and min_pixels and region.width * region.height < min_pixels:
                reason = "region smaller than --min-area"
            if reason is not None:
                yield Fault(reason, f"{key}/region {region.region_id}")
                continue
            captions.append(phrase)
            box = [region.x, region.y, region.width, region.height]
            try:
                expressions.append(Expression(id=region.region_id, text=phrase, box=box))
            except ValidationError:  # of a negative side
                yield Fault(OUTSIDE, f"{key}/expression {region.region_id}")
        # COCO's identity lets `vlp data overlap` find the image in evaluation sets of COCO.
        in_coco = data is not None and data.coco_id is not None
        annotation = Annotation(
            captions=list(dict.fromkeys(captions)),
            expressions=expressions,
            source="coco" if in_coco else "visual_genome",
            image_id=str(data.coco_id if data and in_coco else image.id),
            visual_genome_id=image.id,
            **({"url": data.url, "flickr_id": data.flickr_id} if data else {}),
        )
        size = (data.width, data.height) if data else None
        yield SampleSpec(key, (f"{image.id}.jpg",), annotation, size)
    yield from faults
