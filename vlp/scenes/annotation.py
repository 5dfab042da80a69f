"""A scene as the JSON of a sample (`vlp.data.schema`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlp.data.schema import Annotation, Answer, Expression, Question, Word
from vlp.scenes.captions import SceneCaption, captions
from vlp.scenes.expressions import expressions
from vlp.scenes.graph import Scene, relations
from vlp.scenes.negatives import SwapPair
from vlp.scenes.nlvr2 import Statement
from vlp.scenes.nlvr_v1 import BoxStatement
from vlp.scenes.snli_ve import SnliVeTriple
from vlp.scenes.vqa import questions

SOURCE = "scenes"
ANNOTATORS = 10  # answers per question, as in VQA


def annotation(scene: Scene, texts: Sequence[SceneCaption] | None = None) -> Annotation:
    """Annotate a scene with captions (default: `captions`), expressions, questions and boxes."""
    texts = captions(scene) if texts is None else texts
    return Annotation(
        captions=[caption.text for caption in texts],
        source=SOURCE,
        image_id=scene.key,
        boxes=[list(obj.box) for obj in scene.objects],
        expressions=[
            Expression(
                id=f"{scene.key}-{number}",
                text=expression.text,
                box=list(scene.objects[expression.obj].box),
            )
            for number, expression in enumerate(expressions(scene))
        ],
        questions=[
            Question(
                id=f"{scene.key}-{item.kind}",
                question=item.question,
                answers=[Answer(answer=item.answer, count=ANNOTATORS)],
            )
            for item in questions(scene)
        ],
        words=[
            Word(
                caption=number,
                index=word.position,
                word=word.word,
                kind=word.kind,
                box=list(scene.objects[word.obj].box),
            )
            for number, caption in enumerate(texts)
            for word in caption.words
        ],
        scene=graph_of(scene),
    )


def graph_of(scene: Scene) -> dict[str, Any]:
    """Return the scene in JSON's types; relations are [object index, relation, object index]."""
    graph: dict[str, Any] = {
        "image_size": scene.image_size,
        "background": list(scene.background),
        "objects": [{**obj._asdict(), "box": list(obj.box)} for obj in scene.objects],
        "relations": [list(relation) for relation in relations(scene)],
    }
    if scene.cover is not None:
        graph["cover"] = scene.cover
    return graph


def swap_annotation(pair: SwapPair) -> Annotation:
    """Annotate a hard negative; `scene["swap"]` holds the twin image's graph and caption."""
    return Annotation(
        caption=pair.caption.text,
        source=SOURCE,
        image_id=pair.scene.key,
        boxes=[list(obj.box) for obj in pair.scene.objects],
        scene={
            **graph_of(pair.scene),
            "swap": {"kind": pair.kind, "foil": pair.foil.text, "twin": graph_of(pair.twin)},
        },
    )


def statement_annotation(statement: Statement | BoxStatement) -> Annotation:
    """Annotate a statement about two images or about three boxes."""
    scene: dict[str, Any]
    if isinstance(statement, Statement):
        scene = {"left": graph_of(statement.left), "right": graph_of(statement.right)}
    else:
        scene = {"boxes": [[item._asdict() for item in box] for box in statement.scene.boxes]}
    return Annotation(
        statement=statement.text,
        label=statement.label,
        source=SOURCE,
        image_id=statement.key,
        scene=scene,
    )


def snli_ve_annotation(triple: SnliVeTriple) -> Annotation:
    """Annotate an SNLI-VE triple; `scene["cover"]` is the place behind the curtain."""
    return Annotation(
        premise=triple.premise,
        hypothesis=triple.hypothesis,
        label=triple.label,
        source=SOURCE,
        image_id=triple.key,
        boxes=[list(obj.box) for obj in triple.scene.objects],
        scene=graph_of(triple.scene),
    )
