"""Runs in the oracle environment: fla's naive KDA recurrence, chunk and gates, outputs and gradients.

    fla_kda.py CASES.safetensors OUT.safetensors

A case `N/...` holds q, k, v, g, beta, state, do, ds (KDA) or z, a_log, dt_bias, dg (gate, with `bound`). The package is
not imported (that needs Triton); the functions are taken from its files. fla casts to fp32; for fp64 cases the same
code runs with that cast changed to fp64.
"""

import ast
import importlib.util
import sys
import types
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import load_file, save_file


def functions(wide):
    """The naive functions of fla's KDA, computing in `wide`."""
    root = Path(importlib.util.find_spec("fla").submodule_search_locations[0]) / "ops/kda"

    class Torch(types.ModuleType):
        float = wide

        def __getattr__(self, name):
            return getattr(torch, name)

    found = {"torch": Torch("torch"), "F": F, "rearrange": rearrange}
    for file in ("naive.py", "gate.py"):
        tree = ast.parse((root / file).read_text())
        tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("naive_")]
        exec(compile(tree, str(root / file), "exec"), found)
    return found


def gate(fla, case):
    z, a, bias = (case[n].clone().requires_grad_() for n in ("z", "a_log", "dt_bias"))
    if "bound" in case:
        g = fla["naive_kda_lowerbound_gate"](z, a, bias, lower_bound=float(case["bound"]), output_dtype=z.dtype)
    else:
        g = fla["naive_kda_gate"](z, a, bias, output_dtype=z.dtype)
    g.backward(case["dg"])
    return {"g": g.detach(), "dz": z.grad, "da_log": a.grad, "ddt_bias": bias.grad}


def kda(fla, name, case):
    names = ("q", "k", "v", "g", "beta", "state")
    x = {n: case[n].clone().requires_grad_() for n in names}
    o, s = fla[name](x["q"], x["k"], x["v"], x["g"], x["beta"], scale=1.0, initial_state=x["state"],
                     output_final_state=True)
    torch.autograd.backward([o, s], [case["do"], case["ds"]])
    return {"o": o.detach(), "s": s.detach()} | {f"d{n}": x[n].grad for n in names}


if __name__ == "__main__":
    cases = defaultdict(dict)
    for key, value in load_file(sys.argv[1]).items():
        number, _, field = key.partition("/")
        cases[number][field] = value
    out = {}
    for number, case in cases.items():
        wide = next(iter(case.values())).dtype
        fla = functions(wide)
        if "z" in case:
            torch.Tensor.float, kept = (lambda x, w=wide: x.to(w)), torch.Tensor.float
            found = {"gate": gate(fla, case)}
            torch.Tensor.float = kept
        else:
            found = {"recurrent": kda(fla, "naive_recurrent_kda", case), "chunk": kda(fla, "naive_chunk_kda", case)}
        out |= {f"{number}/{form}/{k}": v.contiguous() for form, row in found.items() for k, v in row.items()}
    save_file(out, sys.argv[2])
