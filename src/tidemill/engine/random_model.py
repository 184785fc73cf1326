"""A preset with random weights as a model folder: for trying the stack without a trained model. It talks nonsense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tidemill.core.errors import InputError
from tidemill.model import presets
from tidemill.model.base import write_base
from tidemill.model.causal_lm import K3ForCausalLM
from tidemill.model.chat import build_tokenizer
from tidemill.model.config import K3Config

RANDOM_PRESETS: Mapping[str, Callable[[int], K3Config]] = {"toy": presets.toy, "tiny": presets.tiny}
"""Presets small enough to be made up, by name; each takes the vocabulary size."""


def write_random_model(preset: str, folder: Path, *, seed: int = 0) -> None:
    """Write weights and tokenizer of a preset into `folder`. Raises InputError if there is no such preset."""
    if preset not in RANDOM_PRESETS:
        raise InputError(f"no preset {preset!r}: expected {', '.join(RANDOM_PRESETS)}", field="model")
    tokenizer = build_tokenizer()
    write_base(folder, K3ForCausalLM(RANDOM_PRESETS[preset](tokenizer.size), seed=seed))
    tokenizer.save(folder)
