"""What the oracle suites share: rows of findings, peers in an environment of their own, and a lively random model.

A peer is a script in oracle_peers/, run by the Python of `.oracles` (scripts/oracles.sh makes it); data goes through
files. Our own code runs in the project's environment.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, commit, machine
from torch import Tensor

from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import LinearAttnConfig, ModelConfig, TextConfig

ENVIRONMENT = ROOT / ".oracles"
PYTHON = ENVIRONMENT / "venv/bin/python"
LLAMA = ENVIRONMENT / "llama-build/bin"
LLAMA_BINDINGS = ENVIRONMENT / "src/llama_cpp_python-0.3.36"
COMMIT = "ORACLES_COMMIT"
"""The commit a run of several suites began with: what they write makes the working tree differ."""
_PEERS = Path(__file__).resolve().parent / "oracle_peers"
_PEER_TIMEOUT_S = 1800


@dataclass
class Finding:
    """One row of the table. `limit` is the most `found` may be, or the least if `at_least`."""

    case: str
    measure: str
    found: float
    limit: float
    at_least: bool = False
    note: str = ""

    @property
    def met(self) -> bool:
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def line(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.case}: {self.measure} {self.found:.3g} ({sign} {self.limit:.3g}) " \
               f"{'met' if self.met else 'MISSED'}{'; ' + self.note if self.note else ''}"


@dataclass
class Suite:
    """Findings of one suite; `add` prints each as it comes."""

    name: str
    peers: dict[str, str]
    started: float = field(default_factory=time.time)
    findings: list[Finding] = field(default_factory=list)

    def add(self, case: str, measure: str, found: float, limit: float, *, at_least: bool = False,
            note: str = "") -> None:
        finding = Finding(case, measure, found, limit, at_least, note)
        self.findings.append(finding)
        print(f"{self.name}: {finding.line()}", flush=True)

    def write(self) -> bool:
        """Write benchmarks/oracles/NAME.json; returns whether every finding is met."""
        path = ROOT / f"benchmarks/oracles/{self.name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({
            "name": self.name, "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": os.environ.get(COMMIT) or commit(), "machine": machine(),
            "wall_s": round(time.time() - self.started, 1), "peers": self.peers,
            "rows": [vars(f) | {"met": f.met} for f in self.findings],
        }, indent=1) + "\n")
        return bool(self.findings) and all(f.met for f in self.findings)


def peer(script: str, *args: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Run oracle_peers/SCRIPT.py with the oracle environment's Python; returns what it printed. RuntimeError with its
    last lines if it fails."""
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is missing: run scripts/oracles.sh first (make oracles does)")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(LLAMA_BINDINGS), "LLAMA_CPP_LIB_PATH": str(LLAMA)} | dict(
        env or {})
    done = subprocess.run([str(PYTHON), str(_PEERS / f"{script}.py"), *map(str, args)], env=clean, text=True,
                          capture_output=True, timeout=_PEER_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} failed ({done.returncode}): {done.stderr[-2000:]}")
    return done.stdout


def versions(*packages: str) -> dict[str, str]:
    """Installed versions in the oracle environment."""
    code = "import sys, importlib.metadata as m; print('\\n'.join(m.version(n) for n in sys.argv[1:]))"
    done = subprocess.run([str(PYTHON), "-c", code, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, done.stdout.split(), strict=True))


def relative(found: Tensor, want: Tensor) -> float:
    """|found - want| / |want| over everything, in fp64."""
    return float((found.double() - want.double()).norm() / want.double().norm())


def median_row(found: Tensor, want: Tensor) -> float:
    """Median over rows of the relative error of a row."""
    error = (found.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1)
    return float(error.median())


def argmax_disagreements(found: Tensor, want: Tensor) -> int:
    """Rows whose largest logit differs although the gap of want's two largest exceeds twice the row's largest error."""
    top = want.topk(2, dim=-1).values
    decided = (top[:, 0] - top[:, 1]) > 2 * (found - want).abs().amax(-1)
    return int((decided & (found.argmax(-1) != want.argmax(-1))).sum())


def k3_config(**changes: Any) -> ModelConfig:
    """The random K3 of spec section "independent checks": 8 layers, every mechanism, eps 1e-5 wherever it is a
    parameter."""
    layers = changes.pop("layers", 8)
    full = changes.pop("full", tuple(n for n in (4, 8) if n <= layers))
    heads, dim = changes.pop("heads", (4, 64))
    fields: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": layers,
        "num_attention_heads": heads, "q_lora_rank": 96, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64,
        "linear_attn_config": LinearAttnConfig(
            num_heads=heads, head_dim=dim, full_attn_layers=full,
            kda_layers=tuple(n for n in range(1, layers + 1) if n not in full), gate_lower_bound=-5.0,
            use_full_rank_gate=True),
        "attn_res_block_size": 3, "num_experts": 32, "num_experts_per_token": 4, "moe_intermediate_size": 96,
        "routed_expert_hidden_size": 128, "num_shared_experts": 2, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "mla_latent_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "mla_use_output_gate": True, "latent_moe_use_norm": True, "dtype": "float32", "quantize_experts": False,
    }
    return ModelConfig(text_config=TextConfig(**(fields | changes)))


def linear_config(**changes: Any) -> ModelConfig:
    """A random Kimi Linear of the same size: softplus decay, low-rank gate, SwiGLU, plain residual."""
    base = k3_config().text_config.linear_attn_config
    return k3_config(**({
        "family": "kimi_linear", "q_lora_rank": None, "attn_res_block_size": None, "routed_expert_hidden_size": None,
        "latent_moe_use_norm": False, "mla_use_output_gate": False, "hidden_act": "silu",
        "activation_situ_beta": 1.0, "activation_situ_linear_beta": None, "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": LinearAttnConfig(num_heads=base.num_heads, head_dim=base.head_dim,
                                               full_attn_layers=base.full_attn_layers, kda_layers=base.kda_layers),
    } | changes))


def lively(config: ModelConfig, seed: int = 1) -> CausalLM:
    """A model in which no mechanism is idle: gains 1 ± 0.25, mixture scores of std 1.3, A_log U(-0.5, 1), dt_bias
    N(-2.5, 2), selection bias of std 0.3, SiTU inputs of std 3 and 8."""
    model = CausalLM(config, initialise=False)
    gen = torch.Generator().manual_seed(seed)
    heads = config.text_config.linear_attn_config.num_heads
    inner = 3.0 if config.text_config.hidden_act == "situ" else 1.0
    gains = {"gate_proj.weight": inner, "experts.w1": inner, "up_proj.weight": 8.0 if inner > 1 else 1.0,
             "experts.w3": 8.0 if inner > 1 else 1.0, "down_proj.weight": 0.3, "experts.w2": 0.3}
    with torch.no_grad():
        for name, x in model.state_dict().items():
            noise = torch.randn(x.shape, generator=gen)
            if name.endswith(("norm.weight", "layernorm.weight")):
                x.copy_(1 + 0.25 * noise)
            elif name.endswith("res_proj.weight"):
                x.copy_(noise * 1.3 * x.shape[-1] ** -0.5)
            elif name.endswith("e_score_correction_bias"):
                x.copy_(0.3 * noise)
            elif name.endswith("A_log"):
                x.zero_().view(-1)[:heads] = torch.rand(heads, generator=gen) * 1.5 - 0.5
            elif name.endswith("dt_bias"):
                x.copy_(2.0 * noise - 2.5)
            elif name.endswith("conv1d.weight"):
                x.copy_(0.5 * noise)
            elif name.endswith("embed_tokens.weight"):
                x.copy_(noise)
            else:
                routed_up = name.endswith("routed_expert_up_proj.weight")
                gain = 1.0 if routed_up else next((g for end, g in gains.items() if name.endswith(end)), 1.0)
                if name == "lm_head.weight":
                    gain = 2.0
                x.copy_(noise * gain * x.shape[-1] ** -0.5)
    return model.requires_grad_(False)


def random_ids(vocab: int, length: int, seed: int = 5) -> Tensor:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """docs/oracles.md from the results of all suites."""
    lines = [
        "# Oracles: our model against independent implementations", "",
        "Written by `make oracles`; do not edit. Figures are measured on random models with every mechanism active, or "
        "on random inputs. Errors are relative L2 over all positions unless the row says otherwise.", "",
    ]
    for result in results:
        peers = ", ".join(f"{k} {v}" for k, v in result["peers"].items())
        m = result["machine"]
        lines += [f"## {result['name']}", "", f"{result['when'][:10]}, commit {result['commit']}, {m['cpu']} "
                  f"({m['isa']}), Python {m['python']}; {peers}. {result['wall_s']:.0f} s.", "",
                  "| case | measure | tolerance | found | |", "|---|---|---|---|---|"]
        for row in result["rows"]:
            sign = "≥" if row["at_least"] else "≤"
            lines.append(f"| {row['case']} | {row['measure']} | {sign} {row['limit']:.3g} | {_figure(row['found'])} | "
                         f"{'met' if row['met'] else '**missed**'}{'; ' + row['note'] if row['note'] else ''} |")
        lines.append("")
    return "\n".join(lines)


def _figure(x: float) -> str:
    return "not finite" if not math.isfinite(x) else f"{x:.3g}"
