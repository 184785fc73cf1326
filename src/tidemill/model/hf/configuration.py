"""ModelConfig as Hugging Face configurations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers import PretrainedConfig

from tidemill.core.config import replace
from tidemill.model.config import ModelConfig
from tidemill.model.hub import model_auto_map, write_model_modules

_SCALAR = (int, float, str, bool, type(None))
_OWN = ("name_or_path", "use_cache", "return_dict", "output_hidden_states", "output_attentions")


class _Config(PretrainedConfig):
    """config.json of one family. Fields of the text model are attributes (`hidden_size`, `num_experts`, ...); those of
    one value may be changed before a model is made, and `model_config` checks the whole. ConfigError as
    ModelConfig.from_json."""

    has_no_defaults_at_init: ClassVar[bool] = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(self, **kwargs: Any) -> None:
        data = {k: v for k, v in kwargs.items() if k not in _OWN and not k.startswith("_")}
        if isinstance(dtype := data.get("dtype"), torch.dtype):
            data["dtype"] = str(dtype).removeprefix("torch.")
        self._base = ModelConfig.from_json(data | {"model_type": self.model_type})
        text = {f.name: getattr(self._base.text_config, f.name) for f in dataclasses.fields(self._base.text_config)}
        shown = {k: v for k, v in text.items() if isinstance(v, _SCALAR)}
        super().__init__(**shown, **{k: v for k, v in kwargs.items() if k in _OWN},
                         architectures=[model_auto_map(self.model_type)["AutoModelForCausalLM"].split(".")[1]])
        # The base class takes these for settings of generation and drops them.
        self._shown = tuple(shown)
        for name, value in shown.items():
            if name != "dtype":
                setattr(self, name, value)
        self.use_cache = kwargs.get("use_cache", True)
        self.auto_map = model_auto_map(self.model_type)

    @classmethod
    def wrap(cls, config: ModelConfig) -> _Config:
        """The same configuration for Hugging Face."""
        return cls(**config.to_json())

    @property
    def model_config(self) -> ModelConfig:
        """The configuration as it stands now, checked. ConfigError names the field."""
        values = {name: getattr(self, name) for name in self._shown}
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
        return replace(self._base, text_config=replace(self._base.text_config, **values))

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: saved folders name this package; no copy of its code goes into them."""

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As the base class, and the modules of the Auto classes."""
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
        write_model_modules(Path(save_directory), self.model_type)

    def to_dict(self) -> dict[str, Any]:
        """The mapping of config.json."""
        return self.model_config.to_json() | {
            "auto_map": dict(self.auto_map), "use_cache": self.use_cache,
            "transformers_version": transformers.__version__,
        }

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class K3Config(_Config):
    """Kimi K3."""

    model_type: ClassVar[str] = "kimi_k3"

    def __init__(self, **kwargs: Any) -> None:  # the base class would put a generated one in its place
        super().__init__(**kwargs)


class KimiLinearConfig(_Config):
    """Kimi Linear."""

    model_type: ClassVar[str] = "kimi_linear"

    def __init__(self, **kwargs: Any) -> None:  # the base class would put a generated one in its place
        super().__init__(**kwargs)
