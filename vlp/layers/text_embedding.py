"""BERT's input embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlp.layers.post_norm import NORM_EPS
from vlp.layers.stream import LayerNorm
from vlp.positions.sine import sinusoid

BERT_DEVIATION = 0.02
SINE_BASE = 100.0


class TextEmbedding(nn.Module):
    """Word, position and type embeddings, added and normalised.

    Words and types start as BERT's do. Learned positions start as sines, `sines` times as strong
    as words by root mean square, or with 0 as BERT's do, small and random. From these, which word
    stands beside which is learned last, and until then a text is a bag of words; from strong sines
    what texts have in common hides at first what they say (docs/results/anchors.md).

    Raises:
        ValueError: sines for a width that is odd; a text longer than the position table.
    """

    def __init__(
        self, vocab_size: int, width: int, max_positions: int, sines: float = 0, types: int = 2
    ) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(max_positions, width)
        self.token_type = nn.Embedding(types, width)
        self.norm = LayerNorm(width, eps=NORM_EPS)
        for table in (self.word, self.token_type):
            nn.init.normal_(table.weight, std=BERT_DEVIATION)
        self._start_positions(sines)

    def no_weight_decay(self) -> set[str]:
        """Return the name of the position table, which is exempt from weight decay."""
        return {"position.weight"}

    @torch.no_grad()
    def _start_positions(self, strength: float) -> None:
        if not strength:
            nn.init.normal_(self.position.weight, std=BERT_DEVIATION)
            return
        sines = sinusoid(
            torch.arange(len(self.position.weight)), self.word.embedding_dim, SINE_BASE
        )
        self.position.weight.copy_(strength * BERT_DEVIATION * 2**0.5 * sines)

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
