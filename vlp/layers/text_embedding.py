"""BERT's input embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlp.layers.post_norm import NORM_EPS


class TextEmbedding(nn.Module):
    """Word, position and type embeddings, added and normalised.

    Raises:
        ValueError: a text longer than the position table.
    """

    def __init__(self, vocab_size: int, width: int, max_positions: int, types: int = 2) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(max_positions, width)
        self.token_type = nn.Embedding(types, width)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, text_ids: Tensor) -> Tensor:
        """(B, N) int64 -> (B, N, width)."""
        tokens = text_ids.shape[1]
        if tokens > self.position.num_embeddings:
            raise ValueError(
                f"a text of {tokens} tokens exceeds the {self.position.num_embeddings} positions"
            )
        places = torch.arange(tokens, device=text_ids.device)
        # Every text here is of type 0; the row is looked up so that public weights act in full.
        kind = torch.zeros(1, dtype=torch.long, device=text_ids.device)
        return self.norm(self.word(text_ids) + self.position(places) + self.token_type(kind))
