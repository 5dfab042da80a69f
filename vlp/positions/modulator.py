"""MLP from features of a position to the width of the tokens (Li et al. 2021, Eq. 6)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from vlp.positions.options import require_choice


class Modulator(nn.Sequential):
    """MLP GELU(r W1 + B1) W2 + B2, line 2 of the paper's Algorithm 1.

    Args:
        inputs: features of a group of coordinates.
        outputs: channels of the group's position.
        approximate: of `nn.GELU`; JAX's default is "tanh" (papers.md#fourier-f5).
        dropout: probability after the activation, 0.2 in widget captioning (papers.md#fourier-f6).
        norm: LayerNorm before each dense layer, as in the paper's Reformer (papers.md#fourier-f6).
    """

    dense_in: nn.Linear
    dense_out: nn.Linear

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        approximate: str = "none",
        dropout: float = 0.0,
        norm: bool = False,
    ) -> None:
        if min(inputs, hidden, outputs) < 1:
            raise ValueError(f"an MLP of {inputs}, {hidden} and {outputs} channels has no channels")
        require_choice("GELU", approximate, ("none", "tanh"))
        if not 0 <= dropout < 1:
            raise ValueError(f"the dropout must lie in [0, 1), not {dropout}")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        # Without LayerNorm biases prevail over Fourier features (squared norm 1/2), and positions
        # differ little at first (docs/results/positions.md).
        if norm:
            layers["norm_in"] = nn.LayerNorm(inputs)
        layers["dense_in"] = nn.Linear(inputs, hidden)
        layers["activation"] = nn.GELU(approximate)
        if dropout:
            layers["dropout"] = nn.Dropout(dropout)
        if norm:
            layers["norm_hidden"] = nn.LayerNorm(hidden)
        layers["dense_out"] = nn.Linear(hidden, outputs)
        super().__init__(layers)

    def forward(self, features: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs), in the dtype of the weights or of autocast."""
        return super().forward(features.to(self.dense_in.weight.dtype))
