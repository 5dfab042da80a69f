"""Judgement on signs of life: which rank is silent, and behind which one a step waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_NAMED = 8
_PATIENT = "start", "save", "validate", "end"
_UNUSUAL = 3.0


class Sign(NamedTuple):
    """One sign of life of one rank.

    number: of the sign; host: the rank's machine; step: the optimiser step; moves: phases entered
    so far, the same on all ranks at the same place; phase: the one it is in, for `seconds`;
    usual: the longest that it took before; waits: whether it is in a collective call.
    """

    number: int
    host: str
    step: int
    moves: int
    phase: str
    seconds: float
    usual: float
    waits: bool

    @staticmethod
    def of_end(number: int) -> Sign:
        """Return the last sign of a rank that ends."""
        return Sign(number, "", 0, 0, "end", 0.0, 0.0, False)


class Watcher:
    """Compares each rank's signs with those before.

    Args:
        ranks: who is watched.
        patience: seconds without a new sign after which a rank is silent, and in one phase after
            which a step stands, where that phase never took a third as long.
    """

    def __init__(self, ranks: Sequence[int], patience: float) -> None:
        self._ranks, self._patience = ranks, patience
        self._seen: dict[int, tuple[int, float]] = {}
        self._silent: dict[int, float] = {}
        self._stands: int | None = None

    def see(self, signs: Sequence[Sign | None], now: float) -> tuple[list[str], bool]:
        """Return what is to be said, and whether it is the first word of a hang.

        Args:
            signs: the last one of each watched rank, None before its first.
            now: seconds of a clock that goes forward.
        """
        messages: list[str] = []
        known = {rank: sign for rank, sign in zip(self._ranks, signs) if sign is not None}
        hangs = False
        for rank, sign in known.items():
            number, since = self._seen.get(rank, (None, now))
            if number != sign.number:
                self._seen[rank] = sign.number, now
                if rank in self._silent:
                    away = now - self._silent.pop(rank)
                    messages.append(f"rank {rank} ({sign.host}) is back after {away:.0f} s")
            elif now - since > self._patience and sign.phase != "end" and rank not in self._silent:
                self._silent[rank] = since
                messages.append(
                    f"rank {rank} ({sign.host}) is silent for {now - since:.0f} s; it was in step "
                    f"{sign.step + 1}, {sign.phase}"
                )
                hangs = True
        if self._silent or len(known) < len(signs):
            return messages, hangs
        standing = min(known.values(), key=lambda sign: sign.moves)
        if standing.moves == self._stands or not all(map(self._stands_still, known.values())):
            return messages, hangs
        self._stands = standing.moves
        messages.append(self._behind(known, standing))
        return messages, True

    def _stands_still(self, sign: Sign) -> bool:
        longest = max(self._patience, _UNUSUAL * sign.usual)
        return sign.phase not in _PATIENT and sign.seconds > longest

    def _behind(self, known: dict[int, Sign], last: Sign) -> str:
        """Say which ranks are behind the others, or in no collective call where others are."""
        behind = {rank: sign for rank, sign in known.items() if sign.moves == last.moves}
        busy = {rank: sign for rank, sign in behind.items() if not sign.waits}
        found = busy or behind
        names = ", ".join(f"{rank} ({sign.host})" for rank, sign in list(found.items())[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        others = "; the others wait" if len(found) < len(known) else ""
        return (
            f"step {last.step + 1} stands for {last.seconds:.0f} s: rank {names}{more} in "
            f"{last.phase}{others}"
        )
