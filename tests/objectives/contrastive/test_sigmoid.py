"""The ring of sigmoid losses on 1, 2 and 3 ranks against one loop over all pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from vlp.distributed import gather
from vlp.objectives.contrastive import sigmoid_loss
from vlp.objectives.loss import normalise

ROWS = 12


def inputs():
    random = torch.Generator().manual_seed(0)
    image, text = (torch.randn(ROWS, 5, generator=random).double() for _ in range(2))
    ids = torch.arange(ROWS) % 7  # the same image on several ranks
    valid = torch.ones(ROWS, dtype=torch.bool)
    valid[[1, 10]] = False
    return image, text, ids, valid


def parameters():
    return [torch.tensor(value, dtype=torch.float64) for value in (0.3, -1.5)]


def reference():
    """Loss and gradients of the global batch, one pair at a time."""
    image, text, ids, valid = inputs()
    leaves = [leaf.requires_grad_() for leaf in (image, text, *parameters())]
    image, text, temperature, bias = leaves
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(ROWS):
        for j in range(ROWS):
            if valid[i] and valid[j]:
                logit = image[i] @ text[j] / temperature + bias
                total = total - F.logsigmoid(logit if ids[i] == ids[j] else -logit)
    loss = total / valid.sum()
    return loss.detach(), torch.autograd.grad(loss, leaves)


def run_rank(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    share = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    image, text, ids, valid = (value[share] for value in inputs())
    leaves = [leaf.requires_grad_() for leaf in (image, text, *parameters())]
    image, text, temperature, bias = leaves
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    loss = normalise({"": sigmoid_loss(image, text, ids, valid, temperature, bias)})[""]
    gradients = torch.autograd.grad(loss, leaves)
    if ranks > 1:
        gathered = [gather(gradient) for gradient in gradients[:2]]
        whole = torch.stack([loss.detach(), *gradients[2:]])
        dist.all_reduce(whole)
        gradients = [*gathered, *whole[1:]]
        loss = whole[0]
    # Engines average gradients over ranks.
    torch.save([value / ranks for value in (loss.detach(), *gradients)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_loss_and_gradients_are_those_of_all_pairs(ranks: int, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        run_rank, (ranks, str(tmp_path)), nprocs=ranks, start_method="fork"
    )
    loss, gradients = reference()
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found, [loss, *gradients])


def test_autocast_changes_nothing() -> None:
    image, text, ids, valid = (value for value in inputs())
    arguments = (F.normalize(image).float(), F.normalize(text).float(), ids, valid, *parameters())
    plain = sigmoid_loss(*arguments).total
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sigmoid_loss(*arguments).total, plain)
