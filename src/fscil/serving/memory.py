"""Memory of a process that answers for days."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

M_ARENA_MAX = -8  # of glibc's malloc.h
GIVE_BACK = 15.0  # seconds between two times that free memory is given back


def keep_memory_small() -> None:
    """Has glibc keep two heaps, not eight per core, and give back what is free in them now and then.

    What one thread frees another uses, and what many requests at once have needed does not stay for good. DeiT-Tiny
    under load, taught meanwhile, grew from 858 to 1026 MB in 100 s with the heaps it would have made.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no glibc here
        library = ctypes.CDLL(None)
        library.mallopt(M_ARENA_MAX, 2)
        trim = library.malloc_trim

        def give_back() -> None:
            while True:
                time.sleep(GIVE_BACK)
                trim(0)

        threading.Thread(target=give_back, daemon=True, name="memory").start()
