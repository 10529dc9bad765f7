"""How the C library treats the memory that a step frees."""

from __future__ import annotations

import ctypes

KEEP = 1 << 30  # bytes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... in <malloc.h>


def keep_freed_memory() -> bool:
    """Keep freed memory for the next step instead of handing it back to the system; whether that could be set.

    A step frees activations of megabytes and the next one wants them again. Handed back, each page comes in anew with
    a page fault: some six hundred a step of `simple_cnn` at batch 32, a sixth of its time. Only glibc can be told.
    """
    try:
        tell = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        return False
    return bool(tell(_TRIM_THRESHOLD, KEEP) and tell(_MMAP_THRESHOLD, KEEP))
