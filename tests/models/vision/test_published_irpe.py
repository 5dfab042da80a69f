"""Published iRPE weights: names and shapes as Microsoft's code has them, made up here."""

from __future__ import annotations

import copy

import pytest
import timm
import torch

from vlp.models.vision.published_irpe import from_published, load_published_irpe
from vlp.positions import attach

SIZES = {"img_size": 12, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2}
BUCKETS, HEAD = 50, 4


def plain():
    return timm.create_model("deit_tiny_patch16_224", num_classes=3, **SIZES)


def published(roles, heads=1):
    state = dict(plain().state_dict())
    for layer in range(2):
        for role in roles:
            shape = (heads, BUCKETS, HEAD) if role == "v" else (heads, HEAD, BUCKETS)
            state[f"blocks.{layer}.attn.rpe_{role}.lookup_table_weight"] = torch.randn(shape)
    return state


@pytest.mark.parametrize("roles", ["k", "qk", "qkv"])
def test_it_computes_what_the_published_options_compute(roles, tmp_path):
    """Against our own encoding with the authors' lookup, which equals their code."""
    state = published(roles)
    torch.save({"model": state, "epoch": 3}, tmp_path / "irpe.pth")
    model = load_published_irpe(attach(plain(), "irpe-product", roles), tmp_path / "irpe.pth")
    transposed = {"q_ids_transposed": True} if "q" in roles else {}
    reference = attach(plain(), "irpe-product", roles, **transposed)
    theirs = load_published_irpe(copy.deepcopy(reference), tmp_path / "irpe.pth")

    own = {name: value for name, value in state.items() if "rpe_" not in name}
    for layer in range(2):
        for letter in roles:
            role = {"q": "query", "k": "key", "v": "value"}[letter]
            table = state[f"blocks.{layer}.attn.rpe_{letter}.lookup_table_weight"]
            table = table if letter == "v" else table.transpose(1, 2)
            own[f"blocks.{layer}.attn.positions.0.tables.{role}"] = table
    reference.load_state_dict(own)
    pixels = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        expected = reference.eval()(pixels)
        torch.testing.assert_close(model.eval()(pixels), expected)
        torch.testing.assert_close(theirs.eval()(pixels), expected)


def test_what_does_not_fit_is_named(tmp_path):
    torch.save(published("k"), tmp_path / "k.pth")
    with pytest.raises(ValueError, match=r"k\.pth does not fit the model"):
        load_published_irpe(attach(plain(), "irpe-product", "qk"), tmp_path / "k.pth")
    with pytest.raises(ValueError, match="only tables of contextual iRPE-product"):
        from_published({"blocks.0.attn.rpe_k.rp_rows.lookup_table_weight": torch.zeros(1, 4, 8)})
    with pytest.raises(ValueError, match="lookup_table_bias: only tables"):
        from_published({"blocks.0.attn.rpe_k.lookup_table_bias": torch.zeros(1, 50)})
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_published_irpe(plain(), tmp_path / "nowhere.pth")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("irpe-euclidean", {"ratio": 12.25}, "method is 'product'; .*positions.0 has 'euclidean'"),
        ("irpe-product", {"mode": "bias"}, "mode is 'contextual'; .* has 'bias'"),
        ("irpe-product", {"function": "clip"}, "function is 'piecewise'; .* has 'clip'"),
        ("irpe-product", {"ratio": 1.5}, r"ratio is 1\.9; .* has 1\.5"),
        ("irpe-product", {"prefix_bucket": False}, r"key is \(1, 50, 4\) there and \(1, 49, 4\)"),
        ("irpe-product", {"on": "kv"}, r"value is missing there and \(1, 50, 4\) here"),
    ],
)
def test_a_model_that_would_read_the_tables_otherwise_is_refused_unchanged(
    name, options, message, tmp_path
):
    torch.save(published("k"), tmp_path / "k.pth")
    model = attach(plain(), name, **{"on": "k", **options})
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"k\.pth.*{message}"):
        load_published_irpe(model, tmp_path / "k.pth")
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
