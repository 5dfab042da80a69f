"""Random batches of pretraining for the tiny model."""

import torch

from vlp.data.stream.batch import Batch

ROWS, TOKENS = 8, 12


def batch(rows=ROWS, seed=0):
    """Pairs of noise with 3 to 9 words, of which some are masked."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(*shape, generator=generator)

    lengths = 5 + (random(rows, 1) * 7).long()
    places = torch.arange(TOKENS)
    attention = places < lengths
    words = attention & (places > 0) & (places < lengths - 1)
    ids = (5 + random(rows, TOKENS) * 50).long().masked_fill(~attention, 0)
    chosen = words & (random(rows, TOKENS) < 0.4)
    chosen[:, 1] = True
    return Batch(
        pixels=random(rows, 3, 16, 16) * 2 - 1,
        text_ids=ids,
        attention_mask=attention,
        word_mask=words,
        mlm_ids=ids.masked_fill(chosen, 4),
        mlm_labels=torch.where(chosen, ids, -100),
        mim_mask=random(rows, 4, 4) < 0.5,
        image_ids=torch.arange(rows),
        uniform=random(rows, 2).double(),
        valid=torch.ones(rows, dtype=torch.bool),
        sample_ids=torch.arange(rows),
    )
