"""Groups of several ranks: sums that all hold bit for bit, gradients, and a rank that goes away. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.parallel import GlooGroup, PeerLostError


def together(folder: Path, size: int, work: Callable[[GlooGroup], Any]) -> list[Any]:
    """`work` on every rank at once; results in rank order."""

    def one(rank: int) -> Any:
        group = GlooGroup(folder / "meeting", rank=rank, size=size, meet_s=20, wait_s=20)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def values(rank: int, n: int = 10_007) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_hold_the_same_bits(tmp_path: Path, size: int) -> None:
    sums = together(tmp_path, size, lambda group: group.all_reduce(values(group.rank)))
    assert all(torch.equal(s, sums[0]) for s in sums)
    torch.testing.assert_close(sums[0], torch.stack([values(r) for r in range(size)]).sum(0))


def test_integers_are_summed_exactly_and_the_input_stays(tmp_path: Path) -> None:
    def work(group: GlooGroup) -> tuple[Tensor, Tensor]:
        x = torch.full((3,), 2**53 + group.rank, dtype=torch.int64)
        return x, group.all_reduce(x)

    for rank, (x, total) in enumerate(together(tmp_path, 2, work)):
        assert x.tolist() == [2**53 + rank] * 3
        assert total.tolist() == [2**54 + 1] * 3


def test_gather_and_broadcast(tmp_path: Path) -> None:
    def work(group: GlooGroup) -> tuple[Tensor, Tensor, int]:
        x = torch.full((2, 1), float(group.rank))
        return group.all_gather(x, 1), group.broadcast(x, 1), group.size

    for gathered, sent, size in together(tmp_path, 2, work):
        assert gathered.tolist() == [[0.0, 1.0], [0.0, 1.0]]
        assert (sent.tolist(), size) == ([[1.0], [1.0]], 2)


def test_the_gradient_of_a_sum_passes_through(tmp_path: Path) -> None:
    def work(group: GlooGroup) -> Tensor | None:
        x = values(group.rank, 5).requires_grad_()
        (group.all_reduce(x) * torch.arange(5.0)).sum().backward()
        return x.grad

    for grad in together(tmp_path, 2, work):
        assert grad.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_rank_that_ends_is_noticed_at_once(tmp_path: Path) -> None:
    def work(group: GlooGroup) -> str:
        group.all_reduce(torch.zeros(1))
        if group.rank == 1:
            group.close()
            return ""
        with pytest.raises(PeerLostError) as lost:
            group.all_reduce(torch.zeros(1))
        return str(lost.value)

    assert "rank 0 of 2 lost another" in together(tmp_path, 2, work)[0]


def test_a_rank_that_never_comes_and_one_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match="rank 0 of 2 could not meet"):
        GlooGroup(tmp_path / "meeting", rank=0, size=2, meet_s=0.2)
    with pytest.raises(InputError, match="rank = 2: expected 0 to 1"):
        GlooGroup(tmp_path / "other", rank=2, size=2)
