"""Heads of objectives that a pretraining takes from the model folder it starts from."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_pretraining import ALL, task
from tests_support import tiny_text

from vlp.config import ConfigError


def test_a_start_brings_its_heads_to_student_and_teacher(tmp_path):
    tiny_text().save(tmp_path / "words")
    before = task(vocabulary=str(tmp_path / "words"))
    with torch.no_grad():
        for head in (before.mlm_head, before.mim_head):
            for parameter in head.parameters():
                parameter.normal_()
    before.save_model(tmp_path / "model", before.state_dict())
    start = str(tmp_path / "model")
    built = task(ALL | {"mim": {"output": "cross"}, "teacher": {"queue": 8}}, init_from=start)
    teacher = built.teacher.average.module["mlm_head"].state_dict()
    for name, tensor in before.mlm_head.state_dict().items():
        assert torch.equal(built.mlm_head.state_dict()[name], tensor)
        assert torch.equal(teacher[name], tensor)
    assert len(built.weight_reports) == 2
    assert str(built.weight_reports[1]).startswith(f"{start}/heads.safetensors: ")
    assert not built.weight_reports[1].unused
    without = task(ALL | {"mim": None}, init_from=start)
    assert {name.partition(".")[0] for name in without.weight_reports[1].unused} == {"mim_head"}
    (tmp_path / "model" / "heads.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"heads\.safetensors"):
        task(init_from=start)
    (tmp_path / "model" / "heads.safetensors").unlink()
    assert len(task(init_from=start).weight_reports) == 1


def test_a_head_of_another_shape_keeps_its_own_start(tmp_path):
    tiny_text().save(tmp_path / "words")
    before = task(vocabulary=str(tmp_path / "words"))
    before.save_model(tmp_path / "model", before.state_dict())
    file = tmp_path / "model" / "heads.safetensors"
    heads = load_file(file)
    name = next(name for name in heads if name.startswith("mim_head."))
    save_file(heads | {name: torch.zeros(3)}, file)
    (_, report) = task(init_from=str(tmp_path / "model")).weight_reports
    assert (report.missing, report.unused) == ([name], [name])
