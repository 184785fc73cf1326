"""A preset with random weights as a model folder: for trying the stack without a trained model. It talks nonsense."""

from __future__ import annotations

from pathlib import Path

from tidemill.core.errors import InputError
from tidemill.model.base import write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.chat import build_tokenizer
from tidemill.model.presets import BY_VOCABULARY


def write_random_model(preset: str, folder: Path, *, seed: int = 0) -> None:
    """Write weights and tokenizer of a preset into `folder`. Raises InputError if there is no such preset."""
    if preset not in BY_VOCABULARY:
        raise InputError(f"no preset {preset!r}: expected {', '.join(BY_VOCABULARY)}", field="model")
    tokenizer = build_tokenizer()
    config = BY_VOCABULARY[preset](tokenizer.size).with_control(tokenizer.control)
    write_base(folder, CausalLM(config, seed=seed))
    tokenizer.save(folder)
