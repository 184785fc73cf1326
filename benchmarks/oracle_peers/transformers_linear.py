"""Runs in the oracle environment: transformers' kimi_linear on a folder with original tensor names.

    transformers_linear.py FOLDER IDS.npy PREFILL OUT.npz       logits at once, and PREFILL at once then token by token

Fails if a weight is missing, unexpected or mis-shaped. Prints the class that was loaded.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    folder, ids, prefill = sys.argv[1], torch.from_numpy(np.load(sys.argv[2])).long().unsqueeze(0), int(sys.argv[3])
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                       output_loading_info=True)
    problems = {k: sorted(v) for k, v in info.items() if v}
    if problems:
        sys.exit(f"weights do not fit: {problems}")
    model.eval()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[0]
        out = model(ids[:, :prefill], use_cache=True)
        rows = [out.logits[0]]
        for t in range(prefill, ids.shape[1]):
            out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0])
    np.savez(sys.argv[4], whole=whole.numpy(), cached=torch.cat(rows).numpy())
    print(type(model).__name__)
