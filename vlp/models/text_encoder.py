"""The text encoder: BERT layers or a tower of transformers, and the contrastive projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlp.compilation import on_gpu
from vlp.layers.blocks import PostNormLayer, TextEmbedding, pooled_width
from vlp.models.config import TextConfig
from vlp.models.towers import TrainableTower, create_text_tower, longest_module_list


class TextEncoder(TrainableTower):
    """Text encoder: 66,561,280 parameters with BERT-base, 6 layers, 768 -> 256, no pooler.

    With `text.architecture`, `tower` replaces `embedding` and `layers`; `adapter` fits its width.
    """

    def __init__(self, config: TextConfig, embed_dim: int) -> None:
        super().__init__()
        self.tower: nn.Module | None = None
        width: int = config.width
        if config.architecture is None:
            self.blocks = "layers"
            self.embedding = TextEmbedding(
                config.vocab_size, config.width, config.max_positions, config.position_sines
            )
            self.layers = nn.ModuleList(
                PostNormLayer(config.width, config.heads, config.intermediate, config.dropout)
                for _ in range(config.layers)
            )
        else:
            self.tower = create_text_tower(config)
            self.blocks = f"tower.{longest_module_list(self.tower)}"
            width = self.tower.config.hidden_size  # type: ignore[union-attr, assignment]
        self.projection = nn.Linear(pooled_width(config.pooling, config.width), embed_dim)
        self.adapter = nn.Identity() if width == config.width else nn.Linear(width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.length_groups = config.length_groups
        self.freeze_blocks(config.trainable, "text.trainable")

    @property
    def word_table(self) -> Tensor:
        """Return the embeddings of word pieces, (vocabulary, width of the table)."""
        if self.tower is None:
            return self.embedding.word.weight
        return self.tower.get_input_embeddings().weight  # type: ignore[operator]

    @property
    def pad_id(self) -> int:
        """Return the tower's id of padding; BERT's 0 without a tower or if the tower has no id."""
        return getattr(getattr(self.tower, "config", None), "pad_token_id", None) or 0

    def forward(self, text_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode ids (B, N) int64 with mask (B, N) bool, True = not padding: states (B, N, width).

        With `text.length_groups` above 1, states beyond the longest text of a group are 0.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            # On a GPU, reading the lengths would be a synchronisation.
            in_groups = self.length_groups > 1 and not on_gpu(text_ids)
            encode = self._encode_in_groups if in_groups else self._encode
            states = encode(text_ids, attention_mask)
        return self.adapter(states)

    def _encode_in_groups(self, text_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode (B, N) texts in groups of similar length, without common padding, as `_encode`."""
        order = attention_mask.sum(1).argsort(stable=True)
        group_states = []
        for rows in order.chunk(self.length_groups):
            ids, mask = text_ids[rows], attention_mask[rows]
            longest = int(mask.sum(1).amax())
            states = self._encode(ids[:, :longest], mask[:, :longest])
            group_states.append(nn.functional.pad(states, (0, 0, 0, ids.shape[1] - longest)))
        # `argsort` of the order is its inverse.
        return torch.cat(group_states)[order.argsort()]

    def _encode(self, text_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode ids (B, N) to states before the adapter, (B, N, width of the tower)."""
        if self.tower is not None:
            output = self.tower(input_ids=text_ids, attention_mask=attention_mask.long())
            return output.last_hidden_state
        states = self.dropout(self.embedding(text_ids))
        for layer in self.layers:
            states = layer(states, attention_mask)
        return states


def require_ids(ids: Any) -> Tensor:
    """Return token ids; raise an error unless they are a tensor (B, N)."""
    advice = "give a tensor (texts, tokens) from the model folder's tokenizer"
    if not isinstance(ids, Tensor):
        raise TypeError(f"token ids are of type {type(ids).__name__}; {advice}")
    if ids.ndim != 2:
        raise ValueError(f"token ids have shape {tuple(ids.shape)}; {advice}")
    return ids
