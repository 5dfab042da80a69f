"""Texts of a step on a CPU end at the longest of the batch, which changes nothing."""

from __future__ import annotations

import pytest
import torch
from test_pretraining import batch, task
from test_shared_passes import assert_equal_steps, cross, double, rows, step
from tests_support import TINY_MODEL

from vlp.compilation import gpu_form
from vlp.data.stream.batch import Batch


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
