"""The generated corpus: pictures of coloured shapes, captions and every other task's samples."""

from vlp.data.scenes.annotation import annotation
from vlp.data.scenes.captions import Caption, captions, word_objects
from vlp.data.scenes.distinct import ambiguous_share, distinct_scenes
from vlp.data.scenes.graph import Obj, Scene
from vlp.data.scenes.render import encode_png, render
from vlp.data.scenes.sample import sample_scene
from vlp.data.scenes.splits import SPLITS, Split, split_of

__all__ = [
    "SPLITS",
    "Caption",
    "Obj",
    "Scene",
    "Split",
    "ambiguous_share",
    "annotation",
    "captions",
    "distinct_scenes",
    "encode_png",
    "render",
    "sample_scene",
    "split_of",
    "word_objects",
]
