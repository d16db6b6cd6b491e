"""Memory that programs of ``host_program`` read and write, and what is behind a result."""

import numpy as np

GUARD = 64  # bytes after a result that must stay as they are


def aligned(nbytes, guard=0):
    """Bytes from a multiple of 16 on."""
    memory = np.full(nbytes + guard + 16, 0xAB, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + nbytes + guard]


def copied(array):
    memory = aligned(array.nbytes)
    memory[:] = array.reshape(-1).view(np.uint8)
    return memory


def guarded(got, want):
    np.testing.assert_array_equal(got[: want.size], want)
    assert (got[want.size :] == 0xAB).all()
