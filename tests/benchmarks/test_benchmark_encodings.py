"""The benchmark of encodings: its counts, its ratios, and the published code beside ours."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import encodings
from benchmarks.__main__ import main
from benchmarks.encodings import EncodingVariant, VariantTimes, macs, ratio, table


def test_macs_are_those_of_the_paper_but_for_values():
    """Table 5: 4,613 M, 4,659 M, 4,706 M; on values the paper adds 179 M, per bucket it is 45 M."""
    plain = macs("plain", 224) / 1e6
    assert plain == pytest.approx(4613, rel=0.005)  # theirs counts norms, too
    added = [macs(f"irpe-product {on}", 224) / 1e6 - plain for on in ("k", "qk", "qkv")]
    assert added[:2] == pytest.approx([4659 - 4613, 4706 - 4613], rel=0.03)
    tokens, width, layers, rows = 197, 384, 12, 50
    assert added == pytest.approx([n * tokens * width * rows * layers / 1e6 for n in (1, 2, 3)])


def test_ratios_are_medians_over_rounds():
    def measured(*seconds):
        return VariantTimes(1e9, 10**6, 2**20, {"training": list(seconds), "inference": [1.0]})

    found = {"plain": measured(1.0, 10.0, 1.0), "other": measured(2.0, 20.0, 1.0)}
    assert ratio(found, "other", "training") == 0.5
    lines = table(found, 4).splitlines()
    assert lines[2].split() == ["other", "1.00M", "1000", "2.0", "50.0%", "4.0", "100.0%", "1"]


def test_it_runs_and_ends_in_figures(monkeypatch, capsys):
    monkeypatch.setattr(encodings, "MODEL", "deit_tiny_patch16_224")
    assert (
        main(["encodings", "--sizes", "32", "--rows", "2", "--rounds", "1", "--only", "rope-axial"])
        == 0
    )
    *_, training, inference = capsys.readouterr().out.splitlines()
    for line, part in ((training, "training"), (inference, "inference")):
        figure = json.loads(line)
        assert figure["name"] == f"encodings/32/rope-axial/{part}"
        assert figure["value"] > 0
        assert figure["unit"] == "%"
    assert main(["encodings", "--only", "nonsense"]) == 2


PUBLISHED = """
import torch
from easydict import EasyDict as edict

def get_rpe_config(ratio, method, mode, shared_head, skip, rpe_on):
    return edict(on=rpe_on, size=50)

class Table(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width))
    def forward(self, x):
        batch, heads, tokens, _ = x.shape
        wide = tokens if x.shape[-1] != tokens else self.weight.shape[0]
        return self.weight.sum() * x.new_ones(batch, heads, tokens, wide)

def build_rpe(config, head_dim, num_heads):
    return [Table(head_dim) if letter in config.on else None for letter in "qkv"]
"""


def test_published_modules_are_called_in_our_hooks(tmp_path, monkeypatch):
    """A stand-in with the published module's functions; the real one is no part of this tree."""
    monkeypatch.delitem(sys.modules, "easydict", raising=False)
    (tmp_path / "irpe.py").write_text(PUBLISHED)
    variants = encodings.published_variants(tmp_path / "irpe.py")
    assert list(variants) == ["published k", "published qk", "published qkv"]
    for name, on in (("published k", "k"), ("published qkv", "qkv")):
        variant = variants[name]
        assert isinstance(variant, EncodingVariant)
        encoding = variant.name(width=8, heads=2)
        assert encoding.hooks == ({"bias"} if on == "k" else {"bias", "value"})
        query = torch.randn(1, 2, 5, 4)
        assert encoding("bias", query, query, None).shape == (1, 2, 5, 5)
    with pytest.raises(OSError, match="nowhere"):
        encodings.published_variants(tmp_path / "nowhere.py")
