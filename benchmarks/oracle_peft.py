"""Adapters in PEFT's names: PEFT computes what we compute, on our model and transformers', and we read what it saves.

Routed experts are left out: their stacked factors have no module in PEFT.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from oracles import Suite, k3_config, linear_config, lively, peer, random_ids, relative, versions
from torch import Tensor

from tidemill.model.base import BaseStore, write_base
from tidemill.model.config import ModelConfig
from tidemill.model.lora import LoraConfig, adapter_shapes, build_manifest, detach, load_adapter
from tidemill.model.peft_files import CONFIG, WEIGHTS, write_adapter
from tidemill.model.tensor_bytes import TensorFile

LIMIT = 1e-5
_CASES: dict[str, tuple[ModelConfig, tuple[str, ...]]] = {
    "K3, our model": (k3_config(), ("attn_out", "mla_down", "dense", "shared_experts")),
    "Kimi Linear, transformers' model": (linear_config(mla_latent_norm_eps=1e-6), ("attn_out", "mla_down", "dense")),
}


def main() -> bool:
    suite = Suite("peft", versions("peft", "transformers"))
    for name, (config, targets) in _CASES.items():
        lora = LoraConfig(rank=4, alpha=6.0, targets=targets)
        with tempfile.TemporaryDirectory() as scratch:
            _compare(suite, Path(scratch), f"{name}, {', '.join(targets)}", config, lora)
    return suite.write()


def _compare(suite: Suite, work: Path, case: str, config: ModelConfig, lora: LoraConfig) -> None:
    write_base(work / "base", lively(config))
    store = BaseStore.open(work / "base")
    model, ids = store.model(), random_ids(config.text_config.vocab_size, 128)
    np.save(work / "ids.npy", ids.numpy())
    tensors = _factors(config, lora)
    manifest = build_manifest(tensors, version=1, base_digest=store.digest, created_step=0, config_digest=lora.digest)
    write_adapter(work / "ours", lora, tensors, manifest)
    source = Path(__file__).resolve().parent.parent / "src"
    peer("peft_lora", work / "base", work / "ours", work / "ids.npy", work / "out.npy", work / "theirs",
         env={"PYTHONPATH": str(source)})
    first, second = torch.from_numpy(np.load(work / "out.npy"))
    load_adapter(model, lora, tensors)
    with torch.no_grad():
        ours = model(ids.unsqueeze(0))[0]
        suite.add(f"{case}: PEFT reads our adapter", "relative L2 of logits", relative(first, ours), LIMIT)
        saved_config = json.loads((work / "theirs" / CONFIG).read_text())
        file = TensorFile(work / "theirs" / WEIGHTS)
        saved = {n.removeprefix("base_model.model."): file.tensor(n).clone() for n in file.names()}
        wanted = {n: x for n, x in saved.items() if n in tensors}
        read = LoraConfig(rank=saved_config["r"], alpha=saved_config["lora_alpha"], targets=lora.targets)
        load_adapter(model, read, wanted)
        again = model(ids.unsqueeze(0))[0]
        suite.add(f"{case}: we read PEFT's", "relative L2 of logits", relative(again, second), LIMIT,
                  note=f"{len(wanted)} tensors")
        detach(model)
        plain = model(ids.unsqueeze(0))[0]
    suite.add(f"{case}: effect of the adapter", "relative L2 of logits", relative(first, plain), 0.01, at_least=True)


def _factors(config: ModelConfig, lora: LoraConfig) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(8)
    tensors: dict[str, Tensor] = {}
    for name, shape in adapter_shapes(config.text_config, lora).items():
        twin = name.replace("up_proj.lora_A", "gate_proj.lora_A")
        tensors[name] = tensors[twin] if twin in tensors else torch.randn(shape, generator=gen) * shape[-1] ** -0.5
    return tensors


if __name__ == "__main__":
    raise SystemExit(not main())
