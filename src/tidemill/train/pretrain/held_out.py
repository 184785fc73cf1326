"""How well a model predicts documents it was not trained on: nats per learned token, and bits per byte of text."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.model.causal_lm import CausalLM
from tidemill.parallel import Group
from tidemill.train.pretrain.sources import Source
from tidemill.train.samples import Sample
from tidemill.train.supervised import Cut, part_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """Of one source. `bits_per_byte` is None where learned tokens are no plain text; it covers every byte of the
    documents and no end mark."""

    source: str
    documents: int
    tokens: int
    loss: float
    bits_per_byte: float | None
    num_bytes: int
    seconds: float


@torch.no_grad()
def measure(model: CausalLM, source: Source, *, context: int, max_tokens: int, cut: Cut, end_id: int,
            group: Group) -> HeldOutLoss:
    """Loss of the source's first held-out documents, `max_tokens` tokens or one document more; every rank computes a
    part and gets the whole. `end_id` marks the end of a text and stands for no byte. A source with nothing held out
    has loss NaN."""
    started = time.monotonic()
    samples: list[Sample] = []
    documents = num_bytes = tokens = 0
    for found in source.held_out():
        if tokens >= max_tokens:
            break
        pieces = list(found.document.pieces(context))
        samples += pieces
        documents, num_bytes = documents + 1, num_bytes + found.num_bytes
        tokens += sum(len(piece.ids) for piece in pieces)
    nats = sample_nats(model, part_of(samples, group), cut=cut, end_id=end_id)
    summed = group.all_reduce(nats.sum(1))
    learned = sum(s.num_sampled for s in samples)
    bits = float(summed[1]) / math.log(2) / num_bytes if num_bytes else None
    return HeldOutLoss(source=source.section.name, documents=documents, tokens=learned,
                       loss=float(summed[0]) / learned if learned else math.nan, bits_per_byte=bits,
                       num_bytes=num_bytes, seconds=round(time.monotonic() - started, 3))


@torch.no_grad()
def sample_nats(model: CausalLM, samples: Sequence[Sample], *, cut: Cut, end_id: int) -> Tensor:
    """Summed negative log-likelihood of each sample's learned tokens, [2, samples] fp64: of all, and of those that are
    not `end_id`."""
    total = torch.zeros(2, len(samples), dtype=torch.float64)
    for batch in cut(samples):
        logits = model(batch.ids, cu_seqlens=batch.cu_seqlens, select=batch.select).float()
        nats = F.cross_entropy(logits, batch.targets, reduction="none")
        both = torch.stack([nats, nats * (batch.targets != end_id)]).double()
        rows = torch.tensor(batch.samples)[batch.rows]
        total.index_add_(1, rows, both)
    return total
