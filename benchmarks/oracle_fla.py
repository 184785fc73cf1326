"""Our KDA recurrence, chunk and gates against fla's naive functions: outputs, final states and every gradient."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from oracles import Suite, peer, relative, versions
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidemill.kernels import kda

FP32_LIMIT, FP64_LIMIT = 1e-5, 1e-9
Case = dict[str, Tensor]
_INPUTS = ("q", "k", "v", "g", "beta", "state")


def main() -> bool:
    suite = Suite("fla", versions("fla-core"))
    cases = {**_kda_cases(), **_gate_cases()}
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "cases.safetensors"), Path(scratch, "out.safetensors")
        save_file({f"{i}/{k}": v for i, case in enumerate(cases.values()) for k, v in case.items()}, source)
        peer("fla_kda", source, target)
        found = load_file(target)
    for i, (name, case) in enumerate(cases.items()):
        theirs: dict[str, Case] = {}
        for key, value in found.items():
            number, form, field = key.split("/")
            if int(number) == i:
                theirs.setdefault(form, {})[field] = value
        _compare(suite, name, case, theirs)
    return suite.write()


def _compare(suite: Suite, name: str, case: Case, theirs: dict[str, Case]) -> None:
    double = next(iter(case.values())).dtype is torch.float64
    limit = FP64_LIMIT if double else FP32_LIMIT
    if "z" in case:
        ours = {"training form": (_gate(case), theirs["gate"])}
        if not double:
            bound = float(case["bound"]) if "bound" in case else None
            g = kda.gate(case["z"].flatten(0, 1), case["a_log"], case["dt_bias"], bound).view_as(case["z"])
            ours["engine form"] = ({"g": g}, theirs["gate"])
    else:
        ours = {"chunk against fla's recurrence": (_chunk(case), theirs["recurrent"]),
                "chunk against fla's chunk": (_chunk(case), theirs["chunk"])}
        if not double:
            o, s = kda.recurrence(*(case[n] for n in _INPUTS))
            ours["engine recurrence against fla's"] = ({"o": o, "s": s}, theirs["recurrent"])
    for form, (mine, want) in ours.items():
        outputs = [k for k in mine if not k.startswith("d")]
        gradients = [k for k in mine if k.startswith("d")]
        for kind, fields in (("outputs", outputs), ("gradients", gradients)):
            if any(not bool(want[f].isfinite().all()) for f in fields):
                suite.findings[-1].note = "fla's own gradients are NaN here: its decay ratios overflow before the mask"
            elif fields:
                suite.add(f"{name}, {form}", f"{kind}, largest relative L2 of {', '.join(fields)}",
                          max(relative(mine[f], want[f]) for f in fields), limit)


def _kda_cases() -> dict[str, Case]:
    """q, k normalised and scaled, g activated: what the recurrence takes. fla's chunk form takes whole chunks of 64."""
    cases: dict[str, Case] = {}
    for dtype in (torch.float32, torch.float64):
        bits = "fp64" if dtype is torch.float64 else "fp32"
        for name, low, high in (("decay spread over (-5, 0)", -5.0, 0.0), ("decay near 0", -0.05, 0.0),
                                ("decay at -5 or 0", -5.0, 0.0)):
            gen = torch.Generator().manual_seed(len(cases))
            batch, length, heads, k_dim, v_dim = 2, 192, 2, 32, 48

            def normal(*shape: int, gen: torch.Generator = gen, dtype: torch.dtype = dtype) -> Tensor:
                return torch.randn(shape, generator=gen, dtype=dtype)

            keys = (batch, length, heads, k_dim)
            share = torch.rand(keys, generator=gen, dtype=dtype)
            if name == "decay at -5 or 0":
                share = share.round()
            q, k = normal(*keys), normal(*keys)
            cases[f"{bits}, {name}"] = {
                "q": q / q.norm(dim=-1, keepdim=True) * k_dim**-0.5, "k": k / k.norm(dim=-1, keepdim=True),
                "v": normal(batch, length, heads, v_dim), "g": low + (high - low) * share,
                "beta": torch.sigmoid(normal(batch, length, heads)), "state": normal(batch, heads, k_dim, v_dim),
                "do": normal(batch, length, heads, v_dim), "ds": normal(batch, heads, k_dim, v_dim),
            }
    return cases


def _gate_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for dtype in (torch.float32, torch.float64):
        for bound in (-5.0, None):
            gen = torch.Generator().manual_seed(len(cases))
            shape = (2, 64, 3, 16)
            case = {"z": 3 * torch.randn(shape, generator=gen, dtype=dtype),
                    "a_log": torch.rand(3, generator=gen, dtype=dtype) * 1.5 - 0.5,
                    "dt_bias": 2 * torch.randn(48, generator=gen, dtype=dtype) - 2.5,
                    "dg": torch.randn(shape, generator=gen, dtype=dtype)}
            if bound is not None:
                case["bound"] = torch.tensor(bound, dtype=dtype)
            name = "bounded gate" if bound else "softplus gate"
            cases[f"{'fp64' if dtype is torch.float64 else 'fp32'}, {name}"] = case
    return cases


def _chunk(case: Case) -> Case:
    x = {n: case[n].clone().requires_grad_() for n in _INPUTS}
    o, s = kda.chunk(*(x[n] for n in _INPUTS), lower_bound=-5.0)
    torch.autograd.backward([o, s], [case["do"], case["ds"]])
    return {"o": o.detach(), "s": s.detach()} | {f"d{n}": _gradient(x[n]) for n in _INPUTS}


def _gate(case: Case) -> Case:
    z, a, bias = (case[n].clone().requires_grad_() for n in ("z", "a_log", "dt_bias"))
    g = kda.gate_train(z, a, bias, float(case["bound"]) if "bound" in case else None)
    g.backward(case["dg"])
    return {"g": g.detach(), "dz": _gradient(z), "da_log": _gradient(a), "ddt_bias": _gradient(bias)}


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


if __name__ == "__main__":
    raise SystemExit(not main())
