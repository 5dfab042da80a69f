"""Words of captions that name COCO's objects, found by the names of categories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import normalizers, pre_tokenizers

from data_tools.rows import Faults, Row, list_rows, parse_rows, read_json
from vlp.config import ConfigError
from vlp.data.file_names import ends_alike
from vlp.data.schema import Box, Word

KIND, SEVERAL = "object", "objects"  # kinds of words: for one object, for any of several
# Further names of categories.
COMMON = {
    "person": ("man", "woman", "boy", "girl", "child", "kid", "lady", "guy", "baby", "toddler"),
    "bicycle": ("bike",),
    "motorcycle": ("motorbike", "motor bike"),
    "airplane": ("plane", "jet", "aeroplane"),
    "boat": ("ship",),
    "dog": ("puppy",),
    "cat": ("kitten",),
    "sports ball": ("ball",),
    "baseball bat": ("bat",),
    "tennis racket": ("racket", "racquet"),
    "wine glass": ("glass",),
    "cup": ("mug",),
    "donut": ("doughnut",),
    "couch": ("sofa",),
    "potted plant": ("plant",),
    "dining table": ("table",),
    "tv": ("television",),
    "cell phone": ("phone", "cellphone"),
    "refrigerator": ("fridge",),
}
# Irregular plurals; () for words without a plural that names the object.
PLURALS = {
    "person": ("people", "persons"),
    "man": ("men",),
    "woman": ("women",),
    "child": ("children",),
    "mouse": ("mice",),
    "knife": ("knives",),
    "glass": (),  # "glasses" are worn on the nose
    "sheep": (),
    "scissors": (),
    "skis": (),
}


class _WordsImage(Row):
    id: int
    file_name: str = ""
    width: int
    height: int


class _Object(Row):
    image_id: int
    category_id: int
    bbox: Box
    iscrowd: bool | None = None


class _Category(Row):
    id: int
    name: str


class CategoryWords:
    """Objects of COCO's instances_*.json files (gzipped or not), and the words that name them."""

    def __init__(self, paths: Iterable[Path], faults: Faults) -> None:
        self._images: dict[int, _WordsImage] = {}
        self._objects: dict[int, list[tuple[str, Box]]] = defaultdict(list)
        self._crowds: dict[int, list[tuple[str, Box]]] = defaultdict(list)
        self._names: dict[tuple[str, ...], str] = {}  # category by the words of its names
        self._plurals: set[str] = set()
        for path in paths:
            self._read(path, faults)
        self._longest = max(map(len, self._names), default=0)

    def is_other_file(self, image_id: int, file_name: str) -> bool:
        """Return whether the instances' image of an id has another file name."""
        image = self._images.get(image_id)
        path = "" if image is None else image.file_name.replace("\\", "/")
        return path != "" and not ends_alike(path, file_name.replace("\\", "/"))

    def size(self, image_id: int) -> tuple[int, int] | None:
        """Return the (width, height) in pixels that an image's boxes refer to; None if unknown."""
        image = self._images.get(image_id)
        return None if image is None else (image.width, image.height)

    def boxes(self, image_id: int) -> list[Box]:
        """Return the boxes of an image's objects, without crowds."""
        return [box for _, box in self._objects.get(image_id, ())]

    def words(self, image_id: int, captions: Sequence[str]) -> list[Word]:
        """Return the words of captions that name objects of the image, with the objects' boxes."""
        objects, crowds = self._objects.get(image_id, []), self._crowds.get(image_id, [])
        boxes: dict[str, list[Box]] = defaultdict(list)
        for category, box in objects + crowds:
            boxes[category].append(box)
        # If an image has one object of a category, a singular word names it; other words may name
        # any object of their category. `orange` and `bat` are ambiguous but rare.
        single = {category for category in boxes if len(boxes[category]) == 1} - dict(crowds).keys()
        return [
            Word(
                caption=number,
                index=index,
                word=word,
                kind=KIND if category in single and word not in self._plurals else SEVERAL,
                box=boxes[category][0],
                others=boxes[category][1:] or None,
            )
            for number, caption in enumerate(captions)
            for index, word, category in self.mentions(caption)
            if category in boxes
        ]

    def mentions(self, caption: str) -> list[tuple[int, str, str]]:
        """Return (index, word, category) of the last word of each category's name in a caption.

        Words are split as by BERT and counted from 0.
        """
        words, mentions, position = _words(caption), [], 0
        while position < len(words):
            # The longest name first: a teddy bear is not a bear.
            for length in range(self._longest, 0, -1):
                name = tuple(words[position : position + length])
                if name in self._names:
                    last = position + len(name) - 1
                    mentions.append((last, words[last], self._names[name]))
                    position = last
                    break
            position += 1
        return mentions

    def _read(self, path: Path, faults: Faults) -> None:
        content = read_json(path, faults)
        names = {}  # of categories by id
        for category in parse_rows(list_rows(content, path, "categories"), _Category, faults):
            names[category.id] = category.name
            for name in (category.name, *COMMON.get(category.name, ())):
                words = _words(name.replace("_", " "))  # LVIS has `aerosol_can`
                if not words:
                    continue
                plurals = _plurals(words[-1])
                self._plurals.update(plurals)
                for form in (words[-1], *plurals):
                    self._names[*words[:-1], form] = category.name
        for image in parse_rows(list_rows(content, path, "images"), _WordsImage, faults):
            if self._images.setdefault(image.id, image).file_name != image.file_name:
                raise ConfigError(
                    f"{path}: image id {image.id} belongs to another image in an earlier file; "
                    "convert each split by itself"
                )
        for instance in parse_rows(list_rows(content, path, "annotations"), _Object, faults):
            name = names.get(instance.category_id, str(instance.category_id))
            boxes = self._crowds if instance.iscrowd else self._objects
            boxes[instance.image_id].append((name, instance.bbox))


def _plurals(noun: str) -> tuple[str, ...]:
    if noun in PLURALS:
        return PLURALS[noun]
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return (f"{noun[:-1]}ies",)
    return (f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s",)


def _words(text: str) -> list[str]:
    return [word for word, _ in _SPLITTER.pre_tokenize_str(_NORMALIZER.normalize_str(text))]


_NORMALIZER = normalizers.BertNormalizer(lowercase=True)
_SPLITTER = pre_tokenizers.BertPreTokenizer()
