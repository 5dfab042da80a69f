"""What is said of a match score that no step has trained, as that of every `vlp align` model."""

from __future__ import annotations

NEVER_MATCHED = "its cross-modal encoder was never trained to match (no ITM)"


def untrained_match_notes(trained: bool, what: str) -> tuple[str, ...]:
    """Return the note that `what`, made by the match score, says nothing; none if it is trained."""
    if trained:
        return ()
    return (f"The match score was never trained (no ITM): {what} says nothing.",)
