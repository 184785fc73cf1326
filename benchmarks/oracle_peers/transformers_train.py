"""Peer of `make bench ONLY=train`: training steps of transformers' kimi_linear, one for each line on standard input.

    python transformers_train.py CONFIG.json BATCH LENGTH

Answers `ready PARAMETERS` once, then the seconds of each step: forward, loss, backward, AdamW, on random ids.
"""

import json
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main(config: str, batch: str, length: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with open(config, encoding="utf-8") as f:
        wanted = json.load(f)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**wanted)).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    print("ready", sum(p.numel() for p in model.parameters()), flush=True)
    for _ in sys.stdin:
        ids = torch.randint(0, wanted["vocab_size"], (int(batch), int(length)))
        started = time.process_time()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(time.process_time() - started, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
