"""How the kernels of ACE-RPE's attention cut their work, and what memory lets them load."""

from __future__ import annotations

from torch import Tensor

BLOCK = 32
"""Most queries and keys of a block."""
_ALIGNED = 16
"""Keys side by side in memory of which loads are wide."""


def block_sizes(
    queries: int, keys: int, groups: int, channels: int, forward: bool
) -> dict[str, int]:
    """Return tokens of a block and how it is compiled, so that its numbers stay in registers.

    Args:
        queries: tokens that ask.
        keys: tokens that answer.
        groups: of the paths, all of which a block holds.
        channels: of a head.
        forward: False for all that computes gradients.
    """
    most = {"QUERIES": BLOCK if groups <= 8 else BLOCK // 2, "KEYS": BLOCK}
    found = {
        name: min(most[name], max(16, power_of_two(tokens)))
        for name, tokens in (("QUERIES", queries), ("KEYS", keys))
    }
    # In blocks of 32 by 32 tokens eight warps hold the same numbers twice, and half as many
    # programs run at a time; wider heads need them for their registers. Blocks that load ahead
    # would leave room for fewer programs, too.
    found |= {"num_warps": 4 if forward or channels <= 64 else 8, "num_stages": 1}
    # Three forward programs run where there were two, for which few numbers leave the registers.
    return found | ({"maxnreg": 168} if forward and channels <= 64 else {})


def readable_keys(path: Tensor) -> int:
    """Return the keys of a row of paths that memory has: its `aligned_length`, or its own.

    What lies behind its own counts nowhere.

    Args:
        path: (B, Q, K, G), of any strides.
    """
    keys, start = path.shape[2], path.storage_offset()
    others = (path.stride(0), path.stride(1), path.stride(3), start)
    whole = aligned_length(keys)
    last = sum((size - 1) * stride for size, stride in zip(path.shape, path.stride()))
    end = (start + last + 1 + whole - keys) * path.itemsize
    even = path.stride(2) == 1 and not any(stride % _ALIGNED for stride in others)
    return whole if even and end <= path.untyped_storage().nbytes() else keys


def aligned_length(keys: int) -> int:
    """Return a length of a row of so many keys after which loads of the next are wide, too."""
    return -(-keys // _ALIGNED) * _ALIGNED


def power_of_two(number: int) -> int:
    """Return the least that is not below a number."""
    return 1 << (number - 1).bit_length()
