"""One sequence of 1,048,576 tokens and a little more at toy width: `make soak ONLY=long_context`.

KDA and its short convolution are walked in full by both forms, the engine's recurrence token by token and the training
form in chunks of 16 (one call of more than 2^16 chunks, and slabs that carry the state). Asked: finite; the forms
agree; a restart from a state saved nearby repeats every output to the bit; a state takes the same bytes after 1,024
tokens and after all; and what was planted at a known position can be read from that position on, not one token earlier.

MLA keeps every position, and a walk of all of them is quadratic, so its engine form runs at probed rows only, over
pages that hold all positions. Asked there: equal to one softmax in fp64, blind to a planted key before its position.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from harness import conclude, write_soak
from rich.progress import Progress
from torch import Tensor

from tidemill.kernels import conv, kda, mla

TOKENS = 1_048_576 + 80
SLAB = 16_384
HEADS, DIM = 2, 16
WIDTH = HEADS * DIM
PLANTS = (7, 4_099, 65_535, 65_536, 131_073, 524_287, 786_433, 1_048_575)
"""Where a value is planted; its key is channel 8 + i of the last head, a channel nothing else writes or decays."""
PROBES = (1_000, 65_534, 65_537, 262_144, 600_001, 1_048_576, TOKENS - 1)
NEARBY = 77
"""Tokens from a saved state to the probe: no multiple of a chunk."""
RANK, ROPE, SCALE = 16, 8, 24**-0.5
AGREE = 1e-5


def main() -> None:
    """Run, write, print, exit."""
    started = time.time()
    torch.set_num_threads(1)
    with torch.no_grad():
        result: dict[str, Any] = {"tokens": TOKENS, "kda": _kda(), "mla": _mla()}
    failed = [f"{part}.{name}" for part in ("kda", "mla") for name, ok in result[part]["checks"].items() if not ok]
    result |= {"failed": failed, "met": not failed}
    path = write_soak("long_context", TOKENS, result, started=started)
    worst = result["kda"]["worst_difference"]
    conclude(f"long_context: {TOKENS} tokens, forms within {worst:.1e}, failed: {', '.join(failed) or 'none'}", path,
             met=not failed)


def _mixed(x: Tensor, begin: int) -> tuple[Tensor, ...]:
    """KDA's inputs for the convolved x[1, T, 5 WIDTH] that starts at position `begin`, plants put in."""
    heads = (1, x.shape[1], HEADS, DIM)
    q, k, v, z, b = (part.reshape(heads) for part in x.split(WIDTH, dim=-1))
    # The upper half of the last head belongs to the plants: only they write there, and it does not decay.
    own = torch.ones(HEADS, DIM)
    own[-1, DIM // 2 :] = 0.0
    q, k = kda.qk_norm(q * own, k * own)
    g = kda.gate(z[0] * 8.0 - 3.0, torch.zeros(HEADS), torch.zeros(WIDTH), -5.0).unsqueeze(0) * own
    beta = torch.sigmoid(b[..., 0])
    for i, position in enumerate(PLANTS):
        t = position - begin
        if 0 <= t < x.shape[1]:
            k[0, t, -1] = F.one_hot(torch.tensor(DIM // 2 + i), DIM).float()
            v[0, t, -1], beta[0, t, -1] = _planted(i), 1.0
    return q, k, v, g, beta


def _planted(i: int) -> Tensor:
    return torch.arange(DIM) / DIM + i + 1.0


def _asked(i: int, state: Tensor) -> Tensor:
    """What a query for plant i reads from state[1, H, K, V]."""
    return state[0, -1, DIM // 2 + i]


def _inputs(index: int) -> Tensor:
    """The raw inputs of slab `index`, a pure function of it."""
    length = min(SLAB, TOKENS - index * SLAB)
    return torch.randn(1, length, 5 * WIDTH, generator=torch.Generator().manual_seed(index))


def _kda() -> dict[str, Any]:
    w = torch.randn(5 * WIDTH, conv.WIDTH, generator=torch.Generator().manual_seed(10**6))
    halo = torch.zeros(1, conv.WIDTH - 1, 5 * WIDTH)
    walked, slabbed = (torch.zeros(1, HEADS, DIM, DIM) for _ in range(2))
    out, in_slabs = (torch.empty(1, TOKENS, HEADS, DIM) for _ in range(2))
    everything: list[tuple[Tensor, ...]] = []
    saved: dict[int, Tensor] = {}
    reads: dict[str, list[bool]] = {"before": [], "from": []}
    sizes: dict[int, int] = {}
    stops = {p - NEARBY for p in PROBES} | {p + d for p in PLANTS for d in (0, 1)} | {1_024}
    with Progress(disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("recurrence and chunks", total=TOKENS)
        for begin in range(0, TOKENS, SLAB):
            raw = _inputs(begin // SLAB)
            args = _mixed(conv.short_conv_train(raw, w, halo), begin)
            halo = conv.halo(raw, halo).clone()
            end = begin + raw.shape[1]
            edges = [begin, *sorted(s for s in stops if begin < s < end), end]
            for a, b in pairwise(edges):
                if a in stops:
                    saved[a] = walked.clone()
                part = [x[:, a - begin : b - begin] for x in args]
                out[:, a:b], walked = kda.recurrence(*part, walked)
                sizes[b] = walked.numel() * walked.element_size() + halo.numel() * halo.element_size()
            in_slabs[:, begin:end], slabbed = kda.chunk(*args, slabbed)
            everything.append(args)
            progress.advance(bar, end - begin)
    for i, position in enumerate(PLANTS):
        reads["before"].append(not bool(_asked(i, saved[position]).any()))
        reads["from"].append(all(torch.equal(_asked(i, s), _planted(i)) for s in (saved[position + 1], walked)))
    packed = [torch.cat(parts, dim=1) for parts in zip(*everything, strict=True)]
    everything.clear()
    whole, state = kda.chunk(*packed)
    restarts = []
    for p in PROBES:
        again, _ = kda.recurrence(*(x[:, p - NEARBY : p + 1] for x in packed), saved[p - NEARBY])
        restarts.append(torch.equal(again, out[:, p - NEARBY : p + 1]))
    differences = {
        "one call of chunks": float((whole - out).abs().max()), "slabs of chunks": float((in_slabs - out).abs().max()),
        "state, one call": float((state - walked).abs().max()), "state, slabs": float((slabbed - walked).abs().max()),
    }
    checks = {
        "finite": all(bool(x.isfinite().all()) for x in (out, whole, in_slabs, walked, state)),
        "forms agree": max(differences.values()) <= AGREE,
        "restarts equal by bits": all(restarts),
        "state constant": sizes[1_024] == sizes[TOKENS] and len(set(sizes.values())) == 1,
        "nothing read before the plant": all(reads["before"]),
        "planted value read from its position to the end": all(reads["from"]),
        "more than 2^16 chunks": -(-TOKENS // kda.CHUNK) > 2**16,
    }
    return {"checks": checks, "differences": differences, "worst_difference": max(differences.values()),
            "state_and_convolution_bytes": sizes[TOKENS], "largest_state_entry": float(walked.abs().max()),
            "chunks": -(-TOKENS // kda.CHUNK), "probes": list(PROBES), "plants": list(PLANTS)}


def _mla() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    pages = torch.randn(-(-TOKENS // mla.PAGE), mla.PAGE, RANK + ROPE, generator=generator)
    flat = pages.view(-1, RANK + ROPE)
    q_lat = torch.randn(1, HEADS, RANK, generator=generator)
    q_pe = torch.randn(1, HEADS, ROPE, generator=generator)
    # A plant answers the first head's query with a score of 40; the rest score about a normal number.
    query = torch.cat([q_lat[0, 0], q_pe[0, 0]])
    plant = 40.0 / SCALE * query / query.square().sum()
    background, table = flat.clone(), torch.arange(len(pages)).unsqueeze(0)
    worst, blind, found = 0.0, [], []
    for position in PLANTS:
        flat[:TOKENS] = background[:TOKENS]
        flat[position] = plant
        for at in (position - 1, position, min(position + 1_000, TOKENS - 1)):
            got = _attend(q_lat, q_pe, pages, table, at)
            keys = flat[: at + 1].double()
            scores = torch.cat([q_lat[0], q_pe[0]], -1).double() @ keys.t() * SCALE
            want = scores.softmax(-1) @ keys[:, :RANK]
            worst = max(worst, float((got[0].double() - want).abs().max()))
            near = bool((got[0, 0] - plant[:RANK]).abs().max() < 1e-3)
            (blind if at < position else found).append(near)
    checks = {"equal to one softmax in fp64": worst <= AGREE, "blind before the plant": not any(blind),
              "planted key found": all(found)}
    return {"checks": checks, "worst_difference": worst, "rows": 3 * len(PLANTS), "pages": len(pages),
            "why_not_all_rows": "every row reads all pages before it: quadratic in the number of tokens"}


def _attend(q_lat: Tensor, q_pe: Tensor, pages: Tensor, table: Tensor, at: int) -> Tensor:
    """The engine's form for one row at position `at`."""
    where, one = torch.tensor([at]), torch.ones(1, dtype=torch.int64)
    plan = mla.plan_tiles(table, where, one, torch.zeros(1, dtype=torch.int64), where, 1)
    return mla.absorbed_tiles(q_lat, q_pe, pages, SCALE, plan)


if __name__ == "__main__":
    main()
