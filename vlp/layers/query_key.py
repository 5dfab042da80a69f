"""Places added to what queries and keys are made of, in every layer, as in DETR; values get none.

"For DETR, the positional encoding is added to the input of every Transformer encoder layer" (Li et
al. 2021, appendix A); DETR leaves values without it (Carion et al. 2020, Fig. 10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vlp.positions.base import PositionContext, PositionEncoding

Place = Callable[[Tensor], Tensor]


def unplaced(states: Tensor) -> Tensor:
    """Return the states (B, T, width) as they are."""
    return states


@dataclass(frozen=True)
class QueryKeyContext(PositionContext):
    """A context that also gives the states (B, T, width) their places, for queries and for keys."""

    place_query: Place = unplaced
    place_key: Place = unplaced


class QueryKeyPlaces(PositionEncoding):
    """Asks the context for the places; has no parameters, so that layers can share an encoding."""

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, context: PositionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys (B, T, width) with their places, values as they are.

        Raises:
            TypeError: the context knows no places.
        """
        if not isinstance(context, QueryKeyContext):
            raise TypeError(f"a QueryKeyContext is needed, not {type(context).__name__}")
        return context.place_query(query), context.place_key(key), value
