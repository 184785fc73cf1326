"""The card of a model that comes with the package, written from files: nothing in it is typed by hand.

It reads what the training left in the model folder (data.json, training.json) and what was measured afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.core.files import write_atomic
from tidemill.model.config import ModelConfig
from tidemill.train.pretrain.job import DATA, TRAINING

MEASURED = "measured.json"
"""Beside the weights: {"when", "commit", "bits_per_byte", "skills"}, written by `make bench ONLY=nano`."""

_FRONT = """---
license: other
license_name: see-data
library_name: tidemill
pipeline_tag: text-generation
language: [en]
tags: [kimi_k3, kda, mla, mixture-of-experts, mxfp4]
---
"""


def write_card(folder: Path) -> Path:
    """README.md of a model folder that holds data.json, training.json and measured.json."""
    data, training, measured = (json.loads((folder / name).read_text(encoding="utf-8"))
                                for name in (DATA, TRAINING, MEASURED))
    config = ModelConfig.read(folder)
    size = sum(p.stat().st_size for p in folder.iterdir() if p.name != "README.md")
    lines = [
        _FRONT, f"# {training['recipe']}", "",
        "A very small model of the K3 architecture, for tests, examples and reinforcement learning on two cores. **It "
        "is no general assistant**: it calls three small tools (`calculator`, `text` and `files`, whose files are made "
        "up), answers a few kinds of easy puzzles, and knows nothing else.",
        "", *_shape(config, training, size), "", "## Training", "", *_training(data, training), "",
        "## Measured", "", *_measured(measured), "", "## Try it", "", "```",
        f"tidemill chat {training['recipe']}", f"tidemill serve {training['recipe']}", "```", "",
    ]
    path = folder / "README.md"
    write_atomic(path, "\n".join(lines).encode())
    return path


def _shape(config: ModelConfig, training: Mapping[str, Any], size: int) -> list[str]:
    text = config.text_config
    return [
        f"{training['parameters']:,} parameters in {len(text.kda_layers)} KDA and {len(text.mla_layers)} MLA layers, "
        f"width {text.hidden_size}, {text.num_experts} experts of which {text.num_experts_per_token} compute, "
        f"attention residuals in blocks of {text.attn_res_block_size}, vocabulary {text.vocab_size}. Routed experts "
        f"are MXFP4; the folder is {size / 1e6:.1f} MB.",
    ]


def _training(data: Mapping[str, Any], training: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{training['tokens']:,} tokens in {training['steps']:,} steps, seed {training['seed']}: `tidemill train "
        f"{training['kind']} {training['recipe']}`. Texts are read from the packages named below, nothing is "
        "downloaded; generated sources follow from the seed. The digests are those of the documents.", "",
        "| source | share | licence | from | digest |", "|---|---:|---|---|---|",
    ]
    weights = sum(row["weight"] for row in data["sources"].values())
    for name, row in data["sources"].items():
        origin = row["package"] or f"task {row['task']}"
        lines.append(f"| {name} | {row['weight'] / weights:.0%} | {row['licence']} | {origin} | "
                     f"{row.get('digest', 'generated')[:19]} |")
    return lines


def _measured(measured: Mapping[str, Any]) -> list[str]:
    bits = measured["bits_per_byte"]
    lines = [
        f"By `make bench ONLY=nano` on {measured['when']}, commit {measured['commit']}. Intervals are 95 %.", "",
        f"Held-out text: **{_interval(bits['model'])} bits per byte**; a byte n-gram model (order {bits['order']}, "
        f"interpolated Kneser-Ney) trained on all of the same training text: {_interval(bits['ngram'])}; "
        f"{bits['documents']} excerpts, {bits['bytes']:,} bytes.", "",
        "| skill | sampled at temperature 1 | greedy | n |", "|---|---:|---:|---:|",
    ]
    lines += [f"| {row['skill']} | {_share(row['sampled'])} | {_share(row['greedy'])} | {row['n']} |"
              for row in measured["skills"]]
    lines += ["", "Whole turns are written by the model, unconstrained. A call is well formed if it parses, names a "
              "declared tool and has the arguments its schema asks for. Problems are those of the test splits, which "
              "training does not see; a reasoning-gym answer counts at full score only."]
    return lines


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['point']:.3f} [{value['lo95']:.3f}, {value['hi95']:.3f}]"


def _share(value: Mapping[str, float]) -> str:
    return f"{value['point']:.1%} [{value['lo95']:.1%}, {value['hi95']:.1%}]"
