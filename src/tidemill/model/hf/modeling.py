"""CausalLM as a Hugging Face model: load, save, forward, loss, `generate()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tidemill.core.errors import InputError
from tidemill.model.base import write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.checkpoint import Checkpoint
from tidemill.model.config import DTYPES, ModelConfig
from tidemill.model.hf.cache import HybridCache
from tidemill.model.hf.configuration import K3Config, KimiLinearConfig, _Config

_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
_IGNORED = frozenset({
    # What the Auto classes add by themselves, or what asks for what is done anyway.
    "adapter_kwargs", "code_revision", "low_cpu_mem_usage", "output_loading_info", "subfolder", "trust_remote_code",
    "use_safetensors", "_from_auto", "_commit_hash", "weights_only",
})


class _ForCausalLM(PreTrainedModel, GenerationMixin):
    """input_ids[B, T] -> logits[B, T, V]. Parameters are named as in the checkpoint, routed experts stacked.

    There are no positional encodings: `position_ids` matter only where a row starts again at 0 without an
    attention_mask, which marks packed documents. Tokens with mask 0 do not exist, wherever they stand, and have zero
    logits.
    """

    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True
    config: _Config
    _wrap: Callable[[ModelConfig], _Config]

    def __init__(self, config: _Config, causal: CausalLM | None = None) -> None:
        """`causal` is taken over as it is; without it a fresh model is made, drawn with torch's generator."""
        super().__init__(config)
        if causal is None:
            causal = CausalLM(config.model_config, seed=int(torch.randint(2**31 - 1, ())))
        self._causal = (causal,)  # in a tuple: its parts are registered below, under the checkpoint's names
        self.model, self.lm_head = causal.model, causal.lm_head
        self.post_init()

    # -- folders ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, dtype: Any = None,
                        torch_dtype: Any = None, device_map: Any = None, **kwargs: Any) -> Any:
        """A model folder, or the name of one on the hub. Packed experts are decoded, tensor by tensor.

        `dtype`: "auto" (as stored), a name or a torch.dtype among float32 and bfloat16. Raises as
        tidemill.model.checkpoint.Checkpoint.open; InputError for arguments that mean nothing here.
        """
        hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
        info = bool(kwargs.get("output_loading_info"))
        generation = kwargs.pop("generation_config", None)
        if args:
            raise InputError("positional arguments of a model class are not supported", field="model_args")
        if device_map not in (None, "cpu", "auto") and str(device_map) != "{'': 'cpu'}":
            raise InputError(f"device_map = {device_map!r}: this model runs on the CPU", field="device_map")
        changes = {name: kwargs.pop(name) for name in list(kwargs) if config is None and name not in _IGNORED}
        if unknown := sorted(set(kwargs) - _IGNORED - {k for k, v in kwargs.items() if v is None}):
            raise InputError(f"{unknown[0]} = {kwargs[unknown[0]]!r}: not supported by this model", field=unknown[0])
        folder = _folder(pretrained_model_name_or_path, hub)
        checkpoint = Checkpoint.open(folder)
        if config is None:
            config = cls._wrap(checkpoint.config)
            for name, value in changes.items():
                setattr(config, name, value)
        asked = _dtype(dtype if dtype is not None else torch_dtype)
        wanted = dataclasses.replace(config.model_config.text_config, quantize_experts=True)
        if asked is not None:
            wanted = dataclasses.replace(wanted, dtype=asked)
        stored = dataclasses.replace(checkpoint.config.text_config, quantize_experts=True, dtype=wanted.dtype)
        if wanted != stored:
            raise InputError("the configuration differs from the folder's", field="config",
                             remedy="Only dtype can be chosen on loading; a changed model is made by from_config.")
        text = dataclasses.replace(checkpoint.config.text_config, dtype=wanted.dtype)
        causal = CausalLM(dataclasses.replace(checkpoint.config, text_config=text), initialise=False)
        checkpoint.fill(causal, rounding=asked is not None)
        config.dtype = causal.config.text_config.torch_dtype
        config.quantize_experts = text.quantize_experts
        config.name_or_path = str(pretrained_model_name_or_path)
        model = cls(config, causal).eval()
        if generation is not None:
            model.generation_config = generation
        elif (folder / "generation_config.json").is_file():
            model.generation_config = cls.generation_config_class.from_pretrained(folder)
        nothing: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(),
                                   "error_msgs": []}
        return (model, nothing) if info else model

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory: Any, *, is_main_process: bool = True, push_to_hub: bool = False, **kwargs: Any,
    ) -> None:
        """Write a model folder: K3's names, experts as MXFP4 unless the configuration says otherwise, with manifest
        and the modules of the Auto classes. `max_shard_size` in bytes. InputError for what is not supported."""
        if push_to_hub:
            raise InputError("push_to_hub: not supported", field="push_to_hub",
                             remedy="Save, then upload the folder with huggingface_hub.")
        state = kwargs.pop("state_dict", None)
        if state is not None:
            raise InputError("state_dict: only the model's own weights are saved", field="state_dict")
        size = kwargs.pop("max_shard_size", None)
        known = {"safe_serialization": True, "save_original_format": True, "token": None, "variant": None,
                 "save_peft_format": True}
        for name, value in kwargs.items():
            if name not in known or value not in (known[name], None):
                raise InputError(f"{name} = {value!r}: not supported by this model", field=name)
        if size is not None and (not isinstance(size, int) or size < 1):
            raise InputError(f"max_shard_size = {size!r}: expected bytes, at least 1", field="max_shard_size")
        if not is_main_process:
            return
        folder, causal = Path(save_directory), self._causal[0]
        causal.config = self.config.model_config
        write_base(folder, causal, **({} if size is None else {"max_shard_bytes": size}))
        self.generation_config.save_pretrained(folder)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0, output_attentions: bool | None = None,
        output_hidden_states: bool | None = None, return_dict: bool | None = None, **kwargs: Any,
    ) -> Any:
        """Logits of all columns, or of the last `logits_to_keep` (a number, or the columns themselves).

        attention_mask[B, S]: 1 for tokens, 0 for padding; of more columns than input_ids the last ones count. With
        labels[B, T] (−100: not counted) also the mean loss, shifted inside. A cache is made and brought up to date if
        `use_cache` (default: if no gradient is recorded) or `past_key_values`. InputError for what is missing,
        malformed or not supported.
        """
        for name, value in (("inputs_embeds", inputs_embeds), ("output_attentions", output_attentions),
                            ("output_hidden_states", output_hidden_states)):
            if value is not None and value is not False:
                raise InputError(f"{name}: not supported by this model", field=name)
        if input_ids is None or input_ids.dim() != 2:
            raise InputError("input_ids[B, T] is required", field="input_ids")
        if past_key_values is not None and not isinstance(past_key_values, HybridCache):
            raise InputError(f"past_key_values is a {type(past_key_values).__name__}: expected a HybridCache",
                             field="past_key_values", remedy="Leave it out; the first forward pass returns one.")
        valid = _valid(attention_mask, input_ids)
        columns = _columns(logits_to_keep, input_ids.shape[1])
        recording = torch.is_grad_enabled()
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not recording)
        if use_cache and recording:
            raise InputError("use_cache: a cache has no gradient", field="use_cache",
                             remedy="Wrap the call in torch.no_grad(), or give use_cache=False.")
        if use_cache:
            cache = self._new_cache() if past_key_values is None else past_key_values
            logits = self._go_on(input_ids, valid, columns, cache)
        else:
            cache = None
            logits = self._whole(input_ids, valid, columns, position_ids if attention_mask is None else None)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels[:, columns], vocab_size=logits.shape[-1], **kwargs)
        output = CausalLMOutputWithPast(loss=cast("Any", loss), logits=cast("Any", logits), past_key_values=cache)
        return output.to_tuple() if return_dict is False else output

    def _whole(self, input_ids: Tensor, valid: Tensor, columns: Tensor, position_ids: Tensor | None) -> Tensor:
        """Logits[B, len(columns), V] from nothing before, differentiable."""
        causal, (batch, length) = self._causal[0], input_ids.shape
        if bool(valid.all()):
            bounds = None if position_ids is None else _documents(position_ids, batch)
            places = (torch.arange(batch).unsqueeze(1) * length + columns).flatten()
            return causal(input_ids, cu_seqlens=bounds, select=places).view(batch, len(columns), -1)
        counts = valid.sum(1)
        bounds = torch.cat([counts.new_zeros(1), counts[counts > 0].cumsum(0)])
        rows = input_ids[valid].unsqueeze(0)
        return _spread(lambda select: causal(rows, cu_seqlens=bounds, select=select), valid, columns)

    def _go_on(self, input_ids: Tensor, valid: Tensor, columns: Tensor, cache: HybridCache) -> Tensor:
        """The same for tokens that follow those in `cache`, which takes them in."""
        causal, past = self._causal[0], cache.past(input_ids.shape[0])
        tokens, counts = input_ids[valid], valid.sum(1)
        if not bool(counts.any()):  # a stretch of padding only
            logits = self.lm_head.weight.new_zeros((*valid[:, columns].shape, self.lm_head.weight.shape[0]))
        else:
            logits = _spread(lambda select: causal.go_on(tokens, counts, past, select=select), valid, columns)
        cache.count(input_ids.shape[1])
        return logits

    # -- what Hugging Face asks of a model ----------------------------------------------------------------------------

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any,
                                      **kwargs: Any) -> Any:
        if generation_config.cache_implementation is not None:
            raise InputError(f"cache_implementation = {generation_config.cache_implementation!r}: this model has a "
                             "cache of its own", field="cache_implementation", remedy="Leave it out.")
        if model_kwargs.get("past_key_values") is not None:
            model_kwargs["past_key_values"]._is_user_defined = True  # the name generate() looks for
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self._new_cache()

    def _new_cache(self) -> HybridCache:
        return HybridCache(self._causal[0].config.text_config)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: CausalLM drew the weights."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: saved folders name this package; no copy of its code goes into them."""

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: Any) -> NoReturn:
        raise InputError("the vocabulary of this model is fixed", field="input_embeddings")

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None,
                                      **kwargs: Any) -> None:
        """Recompute every layer in the backward pass (CausalLM's recompute = "layer")."""
        self.model.recompute = "layer"

    def gradient_checkpointing_disable(self) -> None:
        self.model.recompute = "none"

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.model.recompute != "none"


class K3ForCausalLM(_ForCausalLM):
    """Kimi K3's text model."""

    config_class = K3Config
    _wrap = K3Config.wrap


class KimiLinearForCausalLM(_ForCausalLM):
    """Kimi Linear."""

    config_class = KimiLinearConfig
    _wrap = KimiLinearConfig.wrap


def _folder(name: Any, hub: dict[str, Any]) -> Path:
    """The folder of a model, downloaded first if it is the name of one on the hub."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    hub = {k: v for k, v in hub.items() if v is not None and k != "proxies"}
    return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"], **hub))


def _dtype(wanted: Any) -> str | None:
    """The configuration's name of a dtype asked for; None: as stored."""
    name = str(wanted).removeprefix("torch.")
    if wanted is None or name == "auto":
        return None
    if name not in DTYPES:
        raise InputError(f"dtype = {wanted!r}: expected auto, {', '.join(DTYPES)}", field="dtype")
    return name


def _valid(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor:
    """Which of input_ids[B, T] are tokens, bool [B, T]. InputError if the mask does not fit."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    batch, length = input_ids.shape
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise InputError(f"attention_mask has shape {tuple(attention_mask.shape)}: expected [{batch}, {length} or "
                         "more]", field="attention_mask", remedy="Give 1 for tokens and 0 for padding.")
    return attention_mask[:, attention_mask.shape[1] - length :].bool()


def _columns(keep: int | Tensor, length: int) -> Tensor:
    """The columns whose logits are wanted, int64."""
    every = torch.arange(length)
    return every[keep] if isinstance(keep, Tensor) else every[-keep:] if keep else every


def _documents(position_ids: Tensor, batch: int) -> Tensor | None:
    """Bounds of the documents packed into one row, where positions start again at 0; None if there is one a row."""
    if batch != 1 or position_ids.dim() != 2:
        return None
    begins = (position_ids[0] == 0).nonzero().squeeze(1)
    if len(begins) < 2 or int(begins[0]) != 0:
        return None
    return torch.cat([begins, begins.new_tensor([position_ids.shape[1]])])


def _spread(compute: Any, valid: Tensor, columns: Tensor) -> Tensor:
    """Logits[B, len(columns), V] from compute(places among the valid tokens) -> [S, V]; zeros at padding."""
    wanted = valid[:, columns]
    number = (valid.flatten().cumsum(0) - 1).view(valid.shape)
    found = compute(number[:, columns][wanted])
    flat = found.new_zeros((wanted.numel(), found.shape[-1]))
    return flat.index_copy(0, wanted.flatten().nonzero().squeeze(1), found).view(*wanted.shape, -1)
