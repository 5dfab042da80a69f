"""The text encoder: BERT's embeddings and first layers, and a projection of [CLS]."""

from __future__ import annotations

from torch import Tensor, nn

from vlp.layers.post_norm import PostNormLayer
from vlp.layers.text_embedding import TextEmbedding
from vlp.models.config import TextConfig


class TextEncoder(nn.Module):
    """66,561,280 parameters at the paper's sizes (BERT-base, 6 layers, 768 -> 256, no pooler)."""

    def __init__(self, config: TextConfig, embed_dim: int) -> None:
        super().__init__()
        self.embedding = TextEmbedding(
            config.vocab_size, config.width, config.max_positions, config.position_sines
        )
        self.layers = nn.ModuleList(
            PostNormLayer(config.width, config.heads, config.intermediate)
            for _ in range(config.layers)
        )
        self.projection = nn.Linear(config.width, embed_dim)

    def forward(self, text_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids (B, N) int64 and mask (B, N) bool -> states (B, N, width)."""
        states = self.embedding(text_ids)
        for layer in self.layers:
            states = layer(states, attention_mask)
        return states
