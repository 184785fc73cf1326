"""From token losses to one number. The mode changes the gradient, so it is an explicit setting.

Denominators are taken from the whole global batch before it is cut into micro-batches; each micro-batch then
contributes its share, and the sum does not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tidemill.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Totals of the global batch: sequences B, sampled tokens, and L_max of the constant-length mode."""

    sequences: int
    tokens: int
    max_length: int


def denominators(mask: Tensor, *, max_length: int) -> Denominators:
    """Totals of mask [B, T]; sequences without a sampled token do not count."""
    per_sequence = mask.sum(-1)
    return Denominators(sequences=int((per_sequence > 0).sum()), tokens=int(per_sequence.sum()), max_length=max_length)


def token_mean(loss: Tensor, mask: Tensor, totals: Denominators) -> Tensor:
    """DAPO: sum of token losses over all sampled tokens of the global batch."""
    return (loss * mask).sum() / max(1, totals.tokens)


def seq_mean_token_mean(loss: Tensor, mask: Tensor, totals: Denominators) -> Tensor:
    """GRPO: mean over sequences of the mean over their tokens."""
    per_sequence = (loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return per_sequence.sum() / max(1, totals.sequences)


def seq_mean_token_const(loss: Tensor, mask: Tensor, totals: Denominators) -> Tensor:
    """Dr. GRPO: mean over sequences of the sum over their tokens divided by the constant L_max."""
    return (loss * mask).sum() / (max(1, totals.sequences) * totals.max_length)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Denominators], Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-const": seq_mean_token_const,
}


def aggregate(mode: str, loss: Tensor, mask: Tensor, totals: Denominators) -> Tensor:
    """A micro-batch's share of the batch loss. loss and mask [B, T]; totals of the global batch."""
    try:
        return AGGREGATIONS[mode](loss, mask.to(loss.dtype), totals)
    except KeyError:
        raise InputError(f"aggregation = {mode!r}: expected one of {', '.join(AGGREGATIONS)}",
                         field="aggregation") from None
