"""Settings of the C library for memory that tensors on a CPU have freed."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST, _NEVER = 2**31 - 1, -1


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next tensors; False where glibc is not there.

    By default glibc gives large blocks back to the system at once, and every training step pays
    for having them mapped, cleared and faulted in again. The process then stays as large as it was
    at its peak.
    """
    try:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):  # others have other options
            return False
        set_option = library.mallopt
    except (OSError, AttributeError):
        return False
    # Other threads' own arenas, that of the backward pass for one, hold no large blocks.
    options = {_TRIM_THRESHOLD: _NEVER, _MMAP_THRESHOLD: _LARGEST, _ARENA_MAX: 1}
    done = [bool(set_option(option, value)) for option, value in options.items()]
    return all(done)
