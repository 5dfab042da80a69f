"""Stores that fail for a while: how long a file is asked for again, and what follows."""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import Field

from vlp.config import Config, ConfigError
from vlp.data.shards.bad_samples import DataError
from vlp.data.shards.sample_files import BadSample
from vlp.io import redacted

# Seconds before the second try, and the most before a later one.
_FIRST_WAIT = 1.0
_LONGEST_WAIT = 30.0

# HTTP: the request took too long, too many requests.
_WORTH_ANOTHER_TRY = (408, 429)

# Of S3 and of Google's clouds, where none are set up.
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")

Value = TypeVar("Value")


class OutageConfig(Config):
    """What to do while a store does not answer, answers with errors, or gives damaged files."""

    seconds: float = Field(
        600.0,
        ge=0,
        description="how long a file is asked for again after its first failure; ranks wait for "
        "each other for training.timeout at most",
    )
    silence: float = Field(
        60.0, gt=0, description="seconds without a byte after which a connection counts as failed"
    )
    policy: Literal["fail", "pause", "skip"] = Field(
        "fail",
        description="what follows when it cannot be had: fail ends the run; pause ends it with "
        "exit code 75, by which schedulers start it again; skip drops its samples, counted",
    )


DEFAULT_OUTAGES = OutageConfig()


class Unreachable(Exception):
    """A file that was tried for long enough; the message says the last reason."""


class PausedDataError(DataError):
    """Error for a store that is away for too long, after which the run is started again."""


_retries: Any = None


def retries() -> Any:
    """Return the number of repeated tries of this process and its loader workers, as `value`."""
    global _retries
    if _retries is None:
        _retries = multiprocessing.Value("q", 0)
    return _retries


def share_retries(count: Any) -> None:
    """Count this worker's tries in the number of the process that started it."""
    global _retries
    _retries = count


def patiently(attempt: Callable[[], Value], seconds: float, place: object) -> Value:
    """Return the value of `attempt`, which is tried again after growing, random pauses.

    Args:
        attempt: one try.
        seconds: after the first failure; a try that is under way then comes to its end.
        place: what is tried, for the message that says so once.

    Raises:
        FileNotFoundError, PermissionError, ConfigError, DataError: at once; another try would end
            as this one.
        Unreachable: the last of several tries failed.
    """
    deadline, wait, tries = float("inf"), _FIRST_WAIT, 0
    while True:
        try:
            return attempt()
        except (FileNotFoundError, PermissionError, ConfigError, DataError):
            raise
        except Exception as error:  # every store has its own
            tries += 1
            status = getattr(error, "status", 0)
            said = redacted(str(error))
            reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
            cause = error if said == str(error) else None
            refused = 400 <= status < 500 and status not in _WORTH_ANOTHER_TRY
            if refused or type(error).__name__ in _NO_CREDENTIALS:
                raise PermissionError(reason) from cause
            if tries == 1:
                deadline = time.monotonic() + seconds
                print(f"{place}: {reason}; tried again for {seconds:g} s", file=sys.stderr)
            # A thousand ranks that failed together must not come back together.
            pause = wait * random.uniform(0.5, 1.0)
            if time.monotonic() + pause > deadline:
                raise Unreachable(f"{reason}; tried {tries} times") from cause
        time.sleep(pause)
        with retries().get_lock():
            retries().value += 1
        wait = min(2 * wait, _LONGEST_WAIT)


def given_up(bad: BadSample, policy: str, may_pass: bool = True) -> Exception:
    """Return the error that the policy wants where a shard cannot be had.

    Args:
        bad: the shard, and why.
        policy: see `OutageConfig`.
        may_pass: whether a later start may find it; a run is not paused for what stays.
    """
    if policy == "skip":
        return bad
    if policy == "pause" and may_pass:
        return PausedDataError(f"{bad}; paused: go on with --resume when the store is back")
    return DataError(
        f"{bad}; go on with --resume when it can be had, or drop its samples with "
        "data.outages.policy=skip"
    )
