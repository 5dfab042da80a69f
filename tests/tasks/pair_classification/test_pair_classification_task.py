import pytest
import torch
from pair_shards import annotated_shards, entailment_shards, statement_shards, tiny_folder
from tests_support import CAPTIONS, first_batch

from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_reader import ShardWriter
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import sample_scene
from vlp.tasks.downstream.task import start_parts
from vlp.tasks.pair_classification.data import NLVR2_LABELS
from vlp.tasks.pair_classification.task import (
    Nlvr2AssignmentConfig,
    Nlvr2Config,
    SnliVeConfig,
    build,
)

PLAIN = {"randaugment": False, "crop_scale": [1.0, 1.0], "hflip": False}


def settings(kind, *folders, **more):
    data = {"train": [str(folder) for folder in folders], "augment": PLAIN, "canonical_streams": 4}
    return kind.model_validate({"data": data | more})


def built(config, folder, batch=4):
    parts, _ = start_parts(str(folder), {})
    return build(config, parts, batch, 0, "float32")


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "start")


def test_each_of_two_images_has_its_own_paths(folder, tmp_path):
    """Against a second run in which the other image is another one."""
    task, _ = built(settings(Nlvr2Config, statement_shards(tmp_path / "train")), folder)
    model = task.eval().model
    pixels = torch.randn(3, 1, 3, 16, 16)
    text = model.encode_text(*task.text([CAPTIONS[0]]))
    images = [model.encode_image(one) for one in pixels]
    alone = model.anchor_paths(images[0], text)
    for other in (1, 2):
        both = model.cross_multi_image([images[0], images[other]], text, task.tags).paths
        patches = alone.similarity.shape[1]
        assert torch.equal(both.image_path[:, : 1 + patches], alone.image_path)
        assert torch.equal(both.text_path[:, :, : 1 + patches], alone.text_path)
        theirs = model.anchor_paths(images[other], text)
        assert torch.equal(both.image_path[:, 1 + patches :], theirs.image_path)
        mean = (alone.text_mean + theirs.text_mean) / 2
        torch.testing.assert_close(both.text_mean, mean)
        assert not both.image_path[:, 1 + patches].any()  # the second [CLS]


def test_the_order_of_two_images_matters_by_their_tags(folder, tmp_path):
    task, data = built(settings(Nlvr2Config, statement_shards(tmp_path / "train")), folder)
    batch = first_batch(data)
    turned = batch._replace(pixels=batch.pixels.flip(1))
    task.eval()
    with torch.no_grad():
        assert not torch.allclose(task.logits(batch), task.logits(turned))
        task.tags.zero_()
        torch.testing.assert_close(task.logits(batch), task.logits(turned), rtol=0, atol=1e-5)


def test_a_image_of_panels_is_read_as_images_side_by_side(folder, tmp_path):
    scene = render(sample_scene(0, 0, image_size=48))
    wide = scene.resize((50, 16))
    label = Annotation(statement="a b", label=True)
    shards = annotated_shards(tmp_path / "wide", [label] * 4, encode_png(wide))
    shown = [wide.crop(box) for box in ((0, 0, 16, 16), (16, 0, 33, 16), (33, 0, 50, 16))]
    task, data = built(
        settings(Nlvr2Config, shards).model_copy(update={"images": 1, "panels": 3}), folder
    )
    batch = first_batch(data)
    assert batch.pixels.shape == (4, 3, 3, 16, 16)
    assert torch.equal(batch.pixels[0], torch.stack([task.prepare.evaluate(one) for one in shown]))
    assert task.tags.shape[0] == 3
    assert task.logits(batch).shape == (4, 2)


def test_assignment_puts_the_caption_with_its_image(folder, tmp_path):
    shards = tmp_path / "captioned"
    images = [encode_png(render(sample_scene(0, number, image_size=16))) for number in range(9)]
    with ShardWriter(shards) as writer:
        for number, image in enumerate(images):
            said = Annotation(caption=f"number {number % 8}", source="test", image_id=str(number))
            writer.write(f"{number}", image, "png", said)
    task, _ = built(settings(Nlvr2AssignmentConfig, shards), folder)
    pairs = task.dataset([shards])
    own = [pairs.prepare([decode_image(image, "test")], "", 0, None)[0] for image in images]
    places = []
    for number in range(9):
        claim = pairs.make(pairs.items.read(number), number)
        shown = [next(k for k in range(9) if torch.equal(own[k], p)) for p in claim.pixels]
        # 0 and 8 have the same caption: neither is another image for it.
        assert shown[0] % 8 != shown[1] % 8
        assert (shown.index(number) if number in shown else 2) == claim.label
        places.append(claim.label)
    assert set(places) == {0, 1, 2}


def test_bad_samples_are_named(folder, tmp_path):
    image = encode_png(render(sample_scene(0, 0, image_size=16)))
    annotations = [
        Annotation(hypothesis="a red circle", label="maybe"),
        Annotation(label="neutral"),
        Annotation(hypothesis="a red circle"),
        Annotation(hypothesis="a red circle", label="neutral"),
    ]
    shards = annotated_shards(tmp_path / "bad", annotations, image)
    task, data = built(settings(SnliVeConfig, shards, max_skipped_share=1.0), folder)
    batch = first_batch(data)
    assert int(batch.valid.sum()) == 1
    kinds = sorted(skip.kind for skip in batch.skipped)
    assert kinds == ["no text", "unknown label", "unknown label"]
    where = " ".join(skip.where for skip in batch.skipped)
    assert "'maybe' is not one of entailment, neutral, contradiction" in where
    pairs = task.dataset([shards])
    pairs.images = 2
    with pytest.raises(BadSample, match="no second image"):
        pairs.make(pairs.items.read(3), 3)


@pytest.mark.parametrize("view", ["blank", "shuffled"])
def test_what_the_model_is_shown_can_be_taken_away(folder, tmp_path, view):
    shards = entailment_shards(tmp_path / "train")
    whole, _ = built(settings(SnliVeConfig, shards), folder)
    less, _ = built(settings(SnliVeConfig, shards, view=view), folder)
    item = whole.dataset([shards]).items.read(0)
    seen, left = (task.dataset([shards]).make(item, 0).pixels for task in (whole, less))
    assert not torch.equal(seen, left)
    assert torch.equal(left, less.dataset([shards]).make(item, 0).pixels)
    if view == "shuffled":
        assert torch.allclose(seen.sum(), left.sum(), atol=1e-3)


def test_a_head_goes_on_in_its_own_task_alone(folder, tmp_path):
    config = settings(SnliVeConfig, entailment_shards(tmp_path / "train"))
    before, _ = built(config, folder)
    before.save_model(tmp_path / "saved", before.state_dict())
    torch.manual_seed(1)
    parts, _ = start_parts(str(tmp_path / "saved"), {})
    task, _ = build(config, parts, 4, 0, "float32")
    assert not torch.equal(task.head[0].weight, before.head[0].weight)
    assert task.load_head(parts)
    assert all(torch.equal(a, b) for a, b in zip(task.parameters(), before.parameters()))
    other = settings(Nlvr2Config, statement_shards(tmp_path / "pairs"))
    assert not build(other, parts, 4, 0, "float32")[0].load_head(parts)


@pytest.mark.parametrize("labels", [(False, True), ("False", "True"), ("false", "true"), (0, 1)])
def test_statements_are_true_or_false_however_they_are_spelled(labels):
    for number, label in enumerate(labels):
        said = Annotation(statement="two dogs", label=label)
        assert NLVR2_LABELS.read(said, "here") == ("two dogs", number)
