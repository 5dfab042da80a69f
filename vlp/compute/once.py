"""Lines of the log that are said once, also by code that is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable


def once(log: Callable[..., None]) -> Callable[..., None]:
    """Have a function that logs run once for each of its arguments, constants all.

    The compiler runs it where it traces a call, and leaves nothing of it in the graph. What was
    said is forgotten by `cache_clear`.
    """
    cached = functools.cache(log)

    @functools.wraps(log)
    def run(*constants: Hashable) -> None:
        cached(*constants)

    # The mark is that of torch.compiler.assume_constant_result, which takes seconds to import.
    vars(run).update(_dynamo_marked_constant=True, cache_clear=cached.cache_clear)
    return run
