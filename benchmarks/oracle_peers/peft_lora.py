"""Runs in the oracle environment: PEFT on a folder of ours and an adapter in PEFT's names.

    peft_lora.py MODEL ADAPTER IDS.npy OUT.npy SAVED

MODEL is loaded by our package (its linear maps as nn.Linear, which is what PEFT adapts) or, for Kimi Linear, by
transformers. OUT: logits with the adapter, and with every B factor of it changed; SAVED: what PEFT saves then.
Fails if a tensor of the adapter finds no module.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from transformers import PretrainedConfig


class Plain(nn.Module):
    """A model that PEFT can hold, with our names below it."""

    def __init__(self, model):
        super().__init__()
        self.model, self.lm_head, self.whole = model.model, model.lm_head, [model]
        self.config = PretrainedConfig()

    def forward(self, input_ids, **_):
        return self.whole[0](input_ids)

    prepare_inputs_for_generation = None  # PEFT looks for it; nothing is generated


def load(folder):
    if json.loads((Path(folder) / "config.json").read_text())["model_type"] == "kimi_linear":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model, lambda m, ids: m(input_ids=ids, use_cache=False).logits[0]
    from tidemill.model.base import BaseStore
    from tidemill.model.layers import Linear

    model = BaseStore.open(Path(folder)).model()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                plain = nn.Linear(child.weight.shape[1], child.weight.shape[0], bias=False)
                plain.weight = child.weight
                setattr(module, name, plain)
    return Plain(model), lambda m, ids: m(input_ids=ids)[0]


if __name__ == "__main__":
    folder, adapter, ids, out, saved = sys.argv[1:6]
    base, run = load(folder)
    model = PeftModel.from_pretrained(base, adapter).eval()
    result = model.load_adapter(adapter, "default")
    if result.unexpected_keys:
        sys.exit(f"PEFT found no module for {sorted(result.unexpected_keys)[:5]}")
    ids = torch.from_numpy(np.load(ids)).long().unsqueeze(0)
    with torch.no_grad():
        first = run(model, ids)
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.mul_(-0.5)
        second = run(model, ids)
    model.save_pretrained(saved)
    np.save(out, torch.stack([first, second]).numpy())
