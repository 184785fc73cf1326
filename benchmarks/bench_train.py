"""Training against its targets: `make bench ONLY=train`.

Tokens a second of `mini` against transformers' kimi_linear of the same size, steps in turn on one thread each, by
processor time (the peer is idle while we work). Peak memory of one step with and without recomputation, each in a
process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch
import torch.nn.functional as F
from harness import Metric, bootstrap, interleaved, write_result
from oracles import PYTHON

from tidemill.model.causal_lm import CausalLM, Recompute
from tidemill.model.inventory import active_parameters, total_parameters
from tidemill.model.presets import mini

BATCH, LENGTH = 4, 512
LONG = 8192
MEMORY_PAIRS = 3
"""Peaks repeat to a few percent, and each takes most of a minute."""
HERE = Path(__file__).resolve().parent


def kimi_linear_like_mini() -> dict[str, object]:
    """A flat Kimi-Linear configuration with mini's depth, width and heads, and experts of the same total size: they
    have no latent, so their inner width is halved and two of them make the shared one."""
    text = mini().text_config
    linear = asdict(text.linear_attn_config)
    return {
        "model_type": "kimi_linear", "vocab_size": text.vocab_size, "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size, "num_hidden_layers": text.num_hidden_layers,
        "num_attention_heads": text.num_attention_heads, "num_key_value_heads": text.num_attention_heads,
        "q_lora_rank": text.q_lora_rank, "kv_lora_rank": text.kv_lora_rank,
        "qk_nope_head_dim": text.qk_nope_head_dim, "qk_rope_head_dim": text.qk_rope_head_dim,
        "v_head_dim": text.v_head_dim, "num_local_experts": text.num_experts,
        "num_experts_per_tok": text.num_experts_per_token,
        "moe_intermediate_size": text.moe_intermediate_size * text.expert_width // text.hidden_size,
        "n_shared_experts": text.hidden_size // text.expert_width, "pad_token_id": None, "bos_token_id": None,
        "eos_token_id": None,
        "linear_attn_config": {name: linear[name] for name in (
            "num_heads", "head_dim", "full_attn_layers", "kda_layers", "short_conv_kernel_size")},
    }


class OurSteps:
    """Training steps of mini in this process: forward, loss, backward, AdamW, on random ids."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = CausalLM(mini(), seed=0)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=True)

    def __call__(self) -> float:
        """Seconds of processor time of one step."""
        vocab = self._model.config.text_config.vocab_size
        ids = torch.randint(0, vocab, (BATCH, LENGTH))
        started = time.process_time()
        logits = self._model(ids)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return time.process_time() - started


class PeerSteps:
    """The same of transformers, in its own environment. Ends with the context."""

    def __init__(self, config: Path) -> None:
        script = HERE / "oracle_peers/transformers_train.py"
        self._process = subprocess.Popen([PYTHON, script, config, str(BATCH), str(LENGTH)], text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.parameters = int(self._line().removeprefix("ready "))

    def __enter__(self) -> PeerSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def __call__(self) -> float:
        stdin = self._pipe(self._process.stdin)
        stdin.write("\n")
        stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        line = self._pipe(self._process.stdout).readline().strip()
        if not line:
            raise SystemExit(f"train: the peer ended with code {self._process.wait()}")
        return line

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def peak_bytes(recompute: Recompute) -> int:
    """Peak of one step's private memory beyond the model and its gradients, measured in a new process."""
    done = subprocess.run([sys.executable, __file__, recompute], check=True, capture_output=True, text=True)
    return int(done.stdout)


def step_peak(recompute: Recompute) -> None:
    """The child of `peak_bytes`: one packed row of LONG tokens forward and backward."""
    torch.set_num_threads(1)
    model = CausalLM(mini(), seed=0, recompute=recompute)
    ids = torch.randint(0, model.config.text_config.vocab_size, (1, LONG))
    select = torch.arange(0, LONG, 64)  # the head's logits are no part of what is compared
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model(ids[:, :64]).sum().backward()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    F.cross_entropy(model(ids, select=select), ids[0, select]).backward()
    print(resident("VmHWM") - before)


def resident(field: str) -> int:
    """A memory figure of this process in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Measure and write benchmarks/results/train.json."""
    if not PYTHON.exists():
        raise SystemExit("train: the peer is missing; run scripts/oracles.sh first (or `make oracles`)")
    started = time.time()
    shape = f"{BATCH} x {LENGTH} tokens, fp32, one thread"
    text = mini().text_config
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(kimi_linear_like_mini()))
        with PeerSteps(config) as peer:
            ratio, ours, theirs = interleaved(OurSteps(), peer)
            size = peer.parameters
    tokens = BATCH * LENGTH
    speed = Metric(
        id="mini_tokens_vs_transformers", unit="ratio of tokens/s",
        shape=f"{shape}; {total_parameters(text) / 1e6:.1f} M parameters, {active_parameters(text) / 1e6:.1f} M active;"
              f" peer {size / 1e6:.1f} M parameters",
        value=ratio, ours=ours | {"tokens_per_s": tokens / ours["median"]},
        peer=theirs | {"tokens_per_s": tokens / theirs["median"]})
    plain, lean = [], []
    for _ in range(MEMORY_PAIRS):
        plain.append(peak_bytes("none"))
        lean.append(peak_bytes("layer"))
    memory = Metric(
        id="recompute_peak_memory_share", unit="peak bytes beyond model and gradients, recomputed / kept",
        shape=f"mini, one row of {LONG} tokens, fp32",
        value=bootstrap([a / b for a, b in zip(lean, plain, strict=True)]),
        ours={"recomputed_mib": max(lean) / 2**20, "kept_mib": max(plain) / 2**20})
    write_result("train", [speed, memory], peers={"transformers": "5.24.0 kimi_linear, plain torch"}, started=started)


if __name__ == "__main__":
    step_peak(sys.argv[1])  # type: ignore[arg-type]
