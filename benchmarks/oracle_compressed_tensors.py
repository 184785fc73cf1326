"""Our MXFP4 against compressed-tensors': bytes of encoding, values of decoding."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from oracles import Suite, peer, versions
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidemill.kernels import mxfp4

BLOCKS = 20_000


def main() -> bool:
    suite = Suite("compressed_tensors", versions("compressed-tensors"))
    kinds = _blocks()
    gen = torch.Generator().manual_seed(7)
    packed = torch.randint(0, 256, (BLOCKS, 16), generator=gen).to(torch.uint8)
    scale = torch.arange(BLOCKS).remainder(253).add(1).to(torch.uint8).unsqueeze(-1)
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "in.safetensors"), Path(scratch, "out.safetensors")
        save_file({"w": torch.cat(list(kinds.values())), "packed": packed, "scale": scale}, source)
        peer("compressed_mxfp4", source, target)
        theirs = load_file(target)
    start = 0
    for name, w in kinds.items():
        rows = slice(start, start + len(w))
        start += len(w)
        ours = mxfp4.encode(w)
        zero = (w == 0).all(-1)
        bytes_differ = (ours[0] != theirs["packed"][rows]).any(-1) | (ours[1] != theirs["scale"][rows]).any(-1)
        values_differ = (mxfp4.decode(*ours) != theirs["values"][rows]).any(-1)
        suite.add(f"encode, {name}, {int((~zero).sum())} blocks", "blocks with another byte",
                  int((bytes_differ & ~zero).sum()), 0)
        suite.add(f"encode then decode, {name}, {len(w)} blocks", "blocks with another value",
                  int(values_differ.sum()), 0, note=_zero_note(zero, ours[1], theirs["scale"][rows]))
    suite.add(f"decode, {BLOCKS} blocks of random codes, every scale byte 1 to 253", "elements that differ",
              int((mxfp4.decode(packed, scale) != theirs["given_values"]).sum()), 0)
    return suite.write()


def _zero_note(zero: Tensor, ours: Tensor, theirs: Tensor) -> str:
    if not bool(zero.any()):
        return ""
    return (f"{int(zero.sum())} zero blocks: scale byte {int(ours[zero].max())} here and {int(theirs[zero].max())} "
            "there, zero either way")


def _blocks() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(6)
    normal = torch.randn(BLOCKS, 32, generator=gen) * torch.exp2(torch.randint(-40, 40, (BLOCKS, 1), generator=gen))
    grid = torch.arange(1, 65).div(32.0)
    edges = torch.zeros(64 * 9, 32)
    for i, exponent in enumerate((-100, -60, -20, -2, 0, 2, 20, 60, 100)):
        rows = slice(64 * i, 64 * (i + 1))
        edges[rows] = torch.ldexp(grid.unsqueeze(-1) * grid[::2] * 2, torch.tensor(exponent))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(8).repeat(2)
    tied = (ties * signs).expand(200, 32) * torch.exp2(torch.arange(-100, 100)).unsqueeze(-1)
    mantissas = torch.zeros(256, 32)
    mantissas[:, 5] = 1 + torch.arange(256) / 256
    sparse = torch.zeros(64, 32)
    sparse[:32, 0] = torch.exp2(torch.arange(-16, 16).float())
    return {
        "normal values": normal, "a grid of mantissas": edges, "ties between codes": tied,
        "amax mantissas around 1.75": mantissas, "single values and zeros": sparse,
        "values rounded to bf16": normal.bfloat16().float(),
        "fp32 subnormals beside normals": torch.where(torch.rand(500, 32, generator=gen) < 0.5, 1e-40, 1e-30),
        "fp32 subnormals only": torch.full((4, 32), 1e-40) * torch.rand(4, 32, generator=gen),
    }


if __name__ == "__main__":
    raise SystemExit(not main())
