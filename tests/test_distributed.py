import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from vlp.distributed import gather, global_sum, is_distributed, rank, world_size
from vlp.objectives.contrastive import itc_loss, positives
from vlp.objectives.itm import hard_negatives, itm_loss
from vlp.objectives.loss import normalise
from vlp.objectives.queue import KeyQueue
from vlp.objectives.token import token_losses
from vlp.tasks.pretraining.statistics import anchor_statistics

ROWS, GROUP = 16, 4


def global_batch():
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    valid = torch.ones(ROWS, dtype=torch.bool)
    valid[[2, 3, 13]] = False  # ranks have 6 and 7 real rows
    word_mask = torch.rand(ROWS, 3, generator=random) < 0.8
    word_mask[:, 0] = True
    return {
        "images": normal(ROWS, 4, 5),
        "texts": normal(ROWS, 3, 6),
        "word_mask": word_mask,
        "words": torch.randint(5, 9, (ROWS, 3), generator=random),
        "ids": torch.arange(ROWS) % 11,  # the same image on several ranks
        "valid": valid,
        "draws": torch.rand(ROWS, 2, generator=random, dtype=torch.float64),
    }


def parameters():
    random = torch.Generator().manual_seed(1)
    shapes = {"image": (5, 4), "text": (6, 4), "match": (8, 2), "temperature": (), "tau": ()}
    made = {k: torch.randn(s, generator=random, dtype=torch.float64) for k, s in shapes.items()}
    return {k: v.abs().add(0.1).requires_grad_() for k, v in made.items()}


def train_step(part):
    """Losses and gradients of this rank's share, with every collective the task uses."""
    batch = {name: value[part] for name, value in global_batch().items()}
    weights = parameters()
    image_tokens = F.normalize(batch["images"] @ weights["image"], dim=-1)
    text_tokens = F.normalize(batch["texts"] @ weights["text"], dim=-1)
    image = F.normalize(image_tokens.mean(1), dim=-1)
    text = F.normalize(text_tokens.mean(1), dim=-1)
    keys = gather(torch.cat([image, text], -1))
    ids, valid = batch["ids"][:, None].expand(-1, 2), batch["valid"]
    key_ids, key_valid = gather(ids), gather(valid)
    negatives = hard_negatives(5 * image @ text.T, ids, valid, batch["draws"], GROUP)
    joint = torch.cat([image, text[negatives.text_for_image]], -1)
    caption_loss, word_loss = token_losses(
        *(image_tokens, text_tokens, batch["word_mask"], batch["words"], ids, valid),
        *(weights["tau"], GROUP),
    )
    means = normalise(
        {
            "itc": itc_loss(
                *(image, text, keys[:, :4], keys[:, 4:], positives(ids, key_ids)),
                weights["temperature"],
                valid=valid,
                candidate_valid=key_valid,
            ),
            "token": caption_loss,
            "word": word_loss,
            "itm": itm_loss(
                joint @ weights["match"], torch.zeros(len(ids)).long(), negatives.exists
            ),
        }
    )
    gradients = torch.autograd.grad(sum(means.values()), list(weights.values()))
    similarity = torch.einsum("bmd,bnd->bmn", image_tokens, text_tokens)[..., None]
    statistics = anchor_statistics(
        *(similarity, 0.2, similarity.abs(), similarity > 0), batch["word_mask"], valid
    )
    queue = KeyQueue(20, 4)
    queue.push(keys[:, :4].detach(), keys[:, 4:].detach(), key_ids, key_valid)
    return {
        **{f"mean of {name}": value.detach() for name, value in means.items()},
        **{f"gradient of {name}": g for name, g in zip(weights, gradients, strict=True)},
        **{f"statistic {name}": v for name, v in statistics._asdict().items()},
        **{f"queue {name}": v.clone() for name, v in queue.state_dict().items()},
    }


def run_rank(index, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=index, world_size=ranks)
    assert (rank(), world_size(), is_distributed()) == (index, ranks, True)
    x = torch.tensor([float(index)])
    assert global_sum(x) == sum(range(ranks))
    assert x == index
    assert gather(torch.tensor([index, -index])).tolist() == [
        value for r in range(ranks) for value in (r, -r)
    ]
    assert gather(torch.tensor([index == 1])).tolist() == [r == 1 for r in range(ranks)]
    share = ROWS // ranks
    result = train_step(slice(index * share, (index + 1) * share))
    for name, value in result.items():
        if name.startswith(("mean", "gradient")):  # as DeepSpeed and DDP do
            dist.all_reduce(value)
            value /= ranks
    torch.save(result, f"{folder}/{index}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_do_not_change_losses_gradients_queue_or_statistics(ranks, tmp_path):
    torch.multiprocessing.spawn(run_rank, (ranks, str(tmp_path)), nprocs=ranks)
    expected = train_step(slice(None))
    assert all(value.isfinite().all() for value in expected.values())
    assert all(value.abs().sum() > 0 for name, value in expected.items() if "gradient" in name)
    for index in range(ranks):
        result = torch.load(tmp_path / f"{index}.pt", weights_only=True)
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                result[name], value, msg=lambda m, n=name, i=index: f"{n}, rank {i}: {m}"
            )
