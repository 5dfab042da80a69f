"""The text encoder: BERT's embeddings and first layers, and a projection of [CLS]."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlp.layers.post_norm import PostNormLayer
from vlp.layers.text_embedding import TextEmbedding
from vlp.models.config import TextConfig
from vlp.models.towers.trainable import TrainableTower


class TextEncoder(TrainableTower):
    """66,561,280 parameters at the paper's sizes (BERT-base, 6 layers, 768 -> 256, no pooler).

    Raises:
        ConfigError: `text.trainable` is more layers than there are.
    """

    blocks = "layers"

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
        self.restrict(config.trainable, "text.trainable")

    def forward(self, text_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids (B, N) int64 and mask (B, N) bool -> states (B, N, width)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            states = self.embedding(text_ids)
            for layer in self.layers:
                states = layer(states, attention_mask)
        return states
