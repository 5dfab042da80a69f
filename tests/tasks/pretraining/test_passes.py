import pytest
import torch
from pretraining_batch import batch
from test_pretraining import ALL, task
from tests_support import TINY_MODEL, ace, saved_bytes

from vlp.compilation import compile_regions, gpu_form
from vlp.data.stream.batch import Batch
from vlp.models.cross_encoder import CrossEncoder
from vlp.tasks.pretraining import grad_cache as module
from vlp.tasks.pretraining import task as task_module
from vlp.training.engines.compile import compile_task

TEACHER = {"queue": 8, "warmup_steps": 0}


def cross(**options):
    made = {"layout": "albef", "anchor": TINY_MODEL["cross"]["anchor"] | options.pop("anchor", {})}
    given = options.pop("options", {}).get("anchor", {})
    if "anchor" in options.get("position", ["anchor"]):
        made["options"] = {"anchor": {"threshold": 0.3} | given}
    return TINY_MODEL["cross"] | made | options


def rows():
    found = batch()._replace(pixels=batch().pixels.double())
    found.valid[5] = False
    found.mlm_labels[2] = -100  # a text without a masked word
    return found


def step(built, one, chunk=None):
    built.grad_cache = chunk
    built.zero_grad()
    built.model.anchor_threshold.fill_(0.3)  # it moves between the passes of a step
    if built.teacher:
        built.teacher.forget()
    torch.manual_seed(5)
    output = built(one, 1)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in built.named_parameters() if p.grad is not None}
    return output.losses, output.statistics, gradients


def double(objectives=ALL | {"teacher": TEACHER}, **model):
    built = task(objectives, **model).double()
    if built.teacher:
        built.teacher.average.module.double()
        queue = built.teacher.queue
        queue.image, queue.text = queue.image.double(), queue.text.double()
    return built


def assert_equal_steps(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"position": []},
        {},
        {"layout": "text"},
        {"layers": 1},
        {"pooling": "cls+mean"},
        {"position": ["uniform"]},
        {"position": ["anchor", "alignment", "ape"]},
        {"position": ["anchor", "sine-2d"]},
        ace(mode="bias"),
        ace(roles=["query", "key"], scale=0.5),
        ace(shared_heads=True),
        ace(path_gradient=True, features="encoder"),
    ],
)
def test_images_that_pairs_share_change_no_loss_and_no_gradient(options, monkeypatch):
    built, one = double(cross=cross(**options)), rows()
    found = step(built, one)
    monkeypatch.setattr(CrossEncoder, "shares_images", lambda *_: False)
    assert_equal_steps(found, step(built, one))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["albef", "text"])
@pytest.mark.parametrize("how", ["step", "blocks"])
def test_a_compiled_step_shares_nothing_and_has_the_same_losses(layout, how):
    built, compiled = task(cross=cross(layout=layout)), task(cross=cross(layout=layout))
    compiled.load_state_dict(built.state_dict())
    expected = built(batch(), 1).losses
    torch.compiler.reset()
    compile_task(compiled, how, torch.device("cpu"), backend="eager")
    try:
        output = compiled(batch(), 1)
        output.loss.backward()
    finally:
        compile_regions(None)
        torch.compiler.reset()
    assert output.losses.keys() == expected.keys()
    for name, loss in expected.items():
        torch.testing.assert_close(output.losses[name], loss, rtol=1e-5, atol=1e-6)


def test_layout_ace_and_a_gpu_share_nothing():
    states = torch.zeros(1, 1, 16)
    encoder = task(cross=cross()).model.cross_encoder
    assert encoder.shares_images(states)
    assert not task().model.cross_encoder.shares_images(states)
    with gpu_form():
        assert not encoder.shares_images(states)


@pytest.mark.parametrize("layout", ["albef", "ace"])
def test_padding_that_all_texts_have_changes_no_loss_and_no_gradient(layout, monkeypatch):
    built = double(cross=cross(layout=layout), text=TINY_MODEL["text"] | {"length_groups": 2})
    lengths = rows().attention_mask.sum(1)
    short = lengths.sort().indices[:6]
    one = Batch(*(x[short] if isinstance(x, torch.Tensor) else x for x in rows()))
    longest = int(lengths[short].max())
    assert longest < one.text_ids.shape[1]
    assert one.without_padding().mlm_ids.shape == (6, longest)
    built.objectives["itm"].settings = built.objectives["itm"].settings.model_copy(
        update={"group": 6}
    )
    found = step(built, one)
    monkeypatch.setattr(Batch, "without_padding", lambda self: self)
    assert_equal_steps(found, step(built, one))


def test_padding_stays_where_an_encoding_reads_it(monkeypatch):
    monkeypatch.setattr(Batch, "without_padding", lambda self: 1 / 0)
    position = ["anchor", "alignment", "sine-2d"]
    assert step(task(cross=cross(layout="ace", position=position)), batch())
    with gpu_form():
        assert step(task(cross=cross(layout="ace", position=[])), batch())
    compiled = task()
    compiled.is_compiled = True
    assert step(compiled, batch())
    with pytest.raises(ZeroDivisionError):
        step(task(), batch())


def test_a_step_projects_each_image_once_in_a_layer(monkeypatch):
    """And its teacher's once; whole passes project those of all pairs, and of masked texts."""
    built, one = double(cross=cross()), rows()
    seen = []
    for network in (built.model, built.teacher.average.module["model"]):
        for layer in network.cross_encoder.layers:
            layer.cross_attention.key.register_forward_hook(
                lambda module, given, out: seen.append(len(out))
            )
    step(built, one)
    assert seen == [8] * 2 * TINY_MODEL["cross"]["layers"]
    seen.clear()
    monkeypatch.setattr(CrossEncoder, "shares_images", lambda *_: False)
    step(built, one)
    assert sorted(seen) == [8] * 4 + [24] * 2


ROWS, GROUP, CHUNK = 12, 4, 8  # the last chunk is shorter
SMALL = {"itm": {"group": GROUP}, "contrastive": {"token": {"group": GROUP}}, "teacher": None}


@pytest.mark.parametrize(
    "objectives",
    [
        {},
        {"contrastive": {"kind": "itc"}, "teacher": {"queue": 8, "warmup_steps": 0}},
        {"contrastive": {"kind": "paper"}, "mim": {"output": "cross"}},
        {"contrastive": {"kind": "sigmoid"}},
    ],
)
def test_losses_and_gradients_are_those_of_the_whole_batch(objectives):
    one = batch(ROWS)
    one.valid[5] = False
    one.image_ids[3] = one.image_ids[9]
    options = TINY_MODEL["cross"] | {"options": {"anchor": {"threshold": 0.3}}}
    built = double(ALL | SMALL | objectives, cross=options)
    one = one._replace(pixels=one.pixels.double())
    expected, found = step(built, one), step(built, one, CHUNK)
    assert_equal_steps(found[::2], expected[::2])
    assert found[1].keys() == expected[1].keys()


def test_dropout_is_replayed(monkeypatch):
    """The same chunks, with everything kept, give the same bits."""
    drop = {name: TINY_MODEL[name] | {"dropout": 0.3} for name in ("text", "cross")}
    built = task(ALL | SMALL, **drop)
    with_checkpoints = step(built, batch(ROWS), CHUNK)
    for place in (module, task_module):
        monkeypatch.setattr(place, "checkpoint_activations", lambda function: function())
    kept = step(built, batch(ROWS), CHUNK)
    torch.testing.assert_close(kept[::2], with_checkpoints[::2], rtol=0, atol=0)
    assert not torch.equal(kept[0]["mlm"], step(built, batch(ROWS))[0]["mlm"])


def test_the_running_threshold_is_that_of_the_whole_batch():
    thresholds = []
    for chunk in (None, CHUNK):
        built = task(ALL | SMALL)
        step(built, batch(ROWS), chunk)
        thresholds.append(built.model.anchor_threshold)
    torch.testing.assert_close(*thresholds)
    assert thresholds[0] != 0.3


def test_activations_are_those_of_one_chunk():
    built = task(ALL | SMALL)
    whole = saved_bytes(lambda: built(batch(32), 0))
    built.grad_cache = 4
    assert saved_bytes(lambda: built(batch(32), 0)) < whole / 3
