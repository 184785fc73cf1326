"""A group of processes on this machine, over gloo on the loopback interface.

Every rank calls the same collectives in the same order. Sums are taken in one fixed order and handed to all ranks, so
that all hold the same bits, however the processes were scheduled.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tidemill.core.errors import InputError, TidemillError

MEET_S, WAIT_S = 120.0, 1800.0
"""How long a rank may take to come, and to reach a collective. One that ends is noticed at once."""


class PeerLostError(TidemillError):
    """Another rank ended or did not come."""


class GlooGroup:
    """Group of `size` processes that meet in a file. Members live until `close` or the end of their process."""

    def __init__(self, meeting: Path, *, rank: int, size: int, meet_s: float = MEET_S, wait_s: float = WAIT_S) -> None:
        """Wait for all ranks. `meeting`: a path that did not exist before this group. PeerLostError if one does not
        come within `meet_s`, or later takes longer than `wait_s` to a collective."""
        if not 0 <= rank < size:
            raise InputError(f"rank = {rank}: expected 0 to {size - 1}", field="rank")
        self._rank, self._size = rank, size
        gloo: Any = dist.ProcessGroupGloo  # its stubs leave the options out
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=wait_s)
        try:
            store = dist.FileStore(str(meeting), size)
            # Gloo itself would wait for a rank that never comes as long as for a collective.
            store.set(f"here{rank}", "yes")
            store.wait([f"here{other}" for other in range(size)], timedelta(seconds=meet_s))
            self._gloo: Any = gloo(store, rank, size, options)
        except RuntimeError as e:
            raise PeerLostError(f"rank {rank} of {size} could not meet the others: {e}") from e

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, x: Tensor) -> Tensor:
        """A new tensor: the sum over ranks. The gradient passes through (every rank holds the whole sum's gradient)."""
        return _Sum.apply(x, self)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Shards joined along `dim`; no gradient."""
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._wait(self._gloo.allgather([parts], [x.detach().contiguous()]))
        return torch.cat(parts, dim)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """A new tensor: x of rank `source`; no gradient."""
        out = x.detach().clone(memory_format=torch.contiguous_format)
        options: Any = dist.BroadcastOptions()
        options.rootRank = source
        self._wait(self._gloo.broadcast([out], options))
        return out

    def close(self) -> None:
        """Leave. Idempotent."""
        self._gloo = None

    def _sum(self, x: Tensor) -> Tensor:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        self._wait(self._gloo.allreduce([out]))
        return out

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as e:
            raise PeerLostError(f"rank {self._rank} of {self._size} lost another: {e}") from e


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GlooGroup) -> Tensor:
        return group._sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
