"""Process groups as layers see them. One process is the trivial case, and every collective is then the identity.

Layers ask a group for their share of heads, columns or experts and reduce partial sums through it, so that a group
of many ranks can replace the single one without touching a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tidemill.core.errors import ConfigError


class Group(Protocol):
    """Ranks that share one dimension of the model. Collectives are called by all ranks in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, differentiable; may return x itself."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Shards joined along `dim` in rank order; may return x itself."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x of rank `source`; may return x itself."""
        ...


@dataclass(frozen=True, slots=True)
class SoloGroup:
    """The group of one rank."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """What a model is spread over: tensor-parallel (heads, columns) and expert-parallel (experts) groups."""

    tensor: Group
    expert: Group

    @property
    def rank(self) -> int:
        """Position over all groups, experts varying slowest."""
        return self.expert.rank * self.tensor.size + self.tensor.rank

    @property
    def world_size(self) -> int:
        return self.tensor.size * self.expert.size


def single() -> ParallelContext:
    """One process holds everything."""
    return ParallelContext(tensor=SoloGroup(), expert=SoloGroup())


def share(count: int, group: Group, *, what: str) -> int:
    """This rank's part of `count` things. ConfigError if they do not divide evenly."""
    if count % group.size:
        raise ConfigError(
            f"{what} = {count}: expected a multiple of the group size {group.size}", field=what,
            remedy="Choose a group size that divides it.",
        )
    return count // group.size
