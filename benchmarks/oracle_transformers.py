"""transformers' kimi_linear reads a folder of ours with the checkpoint's tensor names and computes the same logits."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from oracles import Suite, argmax_disagreements, linear_config, lively, peer, random_ids, relative, versions

from tidemill.model.base import write_base

LIMIT = 1e-5
POSITIONS, PREFILL = 150, 40


def main() -> bool:
    suite = Suite("transformers", versions("transformers"))
    configs = {"Kimi Linear, 8 layers": linear_config(mla_latent_norm_eps=1e-6),
               "Kimi Linear, 8 layers, query latent": linear_config(mla_latent_norm_eps=1e-6, q_lora_rank=96)}
    for name, config in configs.items():
        model = lively(config)
        ids = random_ids(config.text_config.vocab_size, POSITIONS)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write_base(folder, model)
            np.save(folder / "ids.npy", ids.numpy())
            peer("transformers_linear", folder, folder / "ids.npy", str(PREFILL), folder / "out.npz")
            with np.load(folder / "out.npz") as found:
                theirs = {key: torch.from_numpy(found[key]) for key in ("whole", "cached")}
        ours = model(ids.unsqueeze(0))[0]
        forms = {"whole": f"{POSITIONS} positions at once",
                 "cached": f"{PREFILL} at once and {POSITIONS - PREFILL} from the cache"}
        for key, form in forms.items():
            suite.add(f"{name}, {form}", "relative L2", relative(ours, theirs[key]), LIMIT)
            suite.add(f"{name}, {form}", "argmax differs where the gap decides",
                      argmax_disagreements(ours, theirs[key]), 0)
    return suite.write()


if __name__ == "__main__":
    raise SystemExit(not main())
