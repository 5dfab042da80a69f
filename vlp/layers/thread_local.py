"""State of one call of a module that threads share."""

from __future__ import annotations

import threading
from typing import Self


class ThreadLocal(threading.local):
    """Attributes that each thread has for itself; a copy and a pickle begin without any."""

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()
