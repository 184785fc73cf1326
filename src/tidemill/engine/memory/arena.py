"""One anonymous mapping from which tensors are cut, whose memory can be given back and taken again in place.

The C allocator may keep freed memory; a mapping of our own gives it back for certain (madvise), without invalidating
the tensors cut from it: after `release` they read as zeros and their pages are taken again at the first write.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
from torch import Tensor

_ALIGN = 64


class Arena:
    """`nbytes` of zeroed memory. Tensors keep the mapping alive; there is no close."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used = 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Cut a zeroed, contiguous, 64-byte aligned tensor. Raises ValueError if the arena is too small."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if self._used + size > self.nbytes:
            raise ValueError(f"arena of {self.nbytes} bytes has no room for {size} more after {self._used}")
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        view = torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._used)
        self._used += padded_bytes(shape, dtype)
        return view.view(shape)

    def release(self) -> None:
        """Give every page back to the system. Contents are lost; tensors stay valid and read as zeros."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def resident_bytes(self) -> int:
        """Bytes of the arena that are in memory now, by mincore."""
        pages = -(-self.nbytes // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))
        if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(self.nbytes), vector):
            raise OSError(ctypes.get_errno(), "mincore failed")
        return sum(v & 1 for v in vector) * mmap.PAGESIZE


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes a tensor takes in an arena, alignment included."""
    size = math.prod(shape) * dtype.itemsize
    return -(-size // _ALIGN) * _ALIGN
