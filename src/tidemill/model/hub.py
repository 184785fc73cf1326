"""What a model folder carries so that Hugging Face's Auto classes find this package in it: `auto_map` entries and the
modules they name, each of which imports one class of tidemill.model.hf.

Needs no transformers. Loading such a folder there takes `trust_remote_code=True`, as for any model outside of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.core.files import write_atomic, write_json

_CONFIGURATION, _MODELING, _TOKENIZATION = "configuration_tidemill", "modeling_tidemill", "tokenization_tidemill"
_CLASSES = {"kimi_k3": ("K3Config", "K3ForCausalLM"), "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM")}
_TOKENIZER = "TidemillTokenizer"


def model_auto_map(family: str) -> dict[str, str]:
    """`auto_map` of config.json."""
    config, model = _CLASSES[family]
    return {"AutoConfig": f"{_CONFIGURATION}.{config}", "AutoModelForCausalLM": f"{_MODELING}.{model}"}


def write_model_modules(folder: Path, family: str) -> None:
    """Write the modules that `model_auto_map` names."""
    config, model = _CLASSES[family]
    _write_module(folder, _CONFIGURATION, config)
    _write_module(folder, _MODELING, model)


def tokenizer_auto_map() -> dict[str, list[str | None]]:
    """`auto_map` of tokenizer_config.json: [slow, fast]."""
    return {"AutoTokenizer": [None, f"{_TOKENIZATION}.{_TOKENIZER}"]}


def write_tokenizer_module(folder: Path) -> None:
    """Write the module that `tokenizer_auto_map` names."""
    _write_module(folder, _TOKENIZATION, _TOKENIZER)


def adopt_tokenizer(folder: Path) -> None:
    """Point a copied tokenizer_config.json, if there is one, at this package: what it named did not come along.
    ConfigError if it is not a JSON object."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ConfigError(f"{file} is not valid JSON: {e}", field="tokenizer") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: the top level is a {type(data).__name__}, expected a mapping", field="tokenizer")
    write_json(file, data | {"auto_map": tokenizer_auto_map(), "tokenizer_class": "PreTrainedTokenizerFast"})
    write_tokenizer_module(folder)


def _write_module(folder: Path, module: str, name: str) -> None:
    text = (f'"""For Hugging Face\'s Auto classes; needs `pip install tidemill[hf]`."""\n\n'
            f'from tidemill.model.hf import {name}\n\n__all__ = ["{name}"]\n')
    write_atomic(folder / f"{module}.py", text.encode())
