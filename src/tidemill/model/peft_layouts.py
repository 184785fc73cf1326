"""Adapters in the two layouts PEFT itself writes, and merging an adapter into plain weights.

Per expert: every expert's map is a module, `…experts.{e}.w1.lora_A.weight` [r, in], `.lora_B.weight` [out, r].
Target parameters: PEFT adapts the stacks w1, w2, w3 of a module `…experts` with wrappers around each other. The first
parameter is innermost: with all three, w3 is `…experts.lora_A.weight`, w2 `…experts.base_layer.lora_A.weight` and w1
`…experts.base_layer.base_layer.lora_A.weight`. A is [E·r, in] with the rank of one expert after the other; B is
[out, r·E] with the expert as its fastest index (read off PEFT 0.21). Our own files (tidemill.model.peft_files) keep the
factors of a stack stacked; they are read here too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from tidemill.core.errors import InputError, IntegrityError, ManifestError
from tidemill.core.files import write_json
from tidemill.model.base import BaseManifest, BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import TextConfig
from tidemill.model.convert import copy_companions
from tidemill.model.inventory import EXPERT_WEIGHTS, TensorSpec, inventory
from tidemill.model.lora import LoraConfig, check_adapter, sites
from tidemill.model.names import TEXT_PREFIX, expert_name
from tidemill.model.peft_files import CONFIG, PREFIX, WEIGHTS, peft_config
from tidemill.model.tensor_bytes import TensorFile, dtype_name, write_tensors

PeftLayout = Literal["per-expert", "target_parameters"]

_FACTOR = re.compile(r"^(.+)\.lora_([AB])\.weight$")
_NESTED = re.compile(r"^(.*\.experts)((?:\.base_layer)*)$")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(w[123])$")
_STACK = re.compile(r"^.*\.experts\.w[123]$")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False), "use_rslora": (None, False), "lora_bias": (None, False), "bias": (None, "none"),
    "fan_in_fan_out": (None, False), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "modules_to_save": (None, []), "layer_replication": (None, []),
}
"""Options of PEFT with the values that mean plain LoRA."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors of one weight: a[n, r, in], b[n, out, r]; n is 1 for a matrix and the number of experts, or 1 where they
    share it, for a stack."""

    a: Tensor
    b: Tensor

    def of(self, expert: int) -> Tensor:
        """B A [out, in] of one expert (0 for a matrix), fp32."""
        a, b = (x[expert if x.shape[0] > 1 else 0].float() for x in (self.a, self.b))
        return b @ a


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """Corrections by the name of the weight in tidemill.model.inventory; each is scaled by alpha / rank."""

    rank: int
    alpha: float
    corrections: Mapping[str, Correction]

    def shared(self, text: TextConfig) -> tuple[LoraConfig, dict[str, Tensor]]:
        """The adapter as this package trains and serves it, with the factors that experts share (a copy each). Raises
        ManifestError if it adapts other weights than whole groups, or shared factors differ."""
        found = {name.removesuffix(".weight") for name in self.corrections}
        everything = list(sites(text, LoraConfig(rank=self.rank, alpha=self.alpha)))
        targets = tuple(dict.fromkeys(site.group for site in everything if site.module in found))
        dtypes = {dtype_name(x.dtype) for c in self.corrections.values() for x in (c.a, c.b)}
        if not targets or len(dtypes) > 1:
            raise ManifestError("the adapter touches no map that can be trained here" if not targets else
                                f"the adapter mixes {' and '.join(sorted(dtypes))}")
        lora = LoraConfig(rank=self.rank, alpha=self.alpha, targets=targets, dtype=dtypes.pop())
        tensors: dict[str, Tensor] = {}
        for site in sites(text, lora):
            c = self.corrections.get(site.module if site.group == "experts" else f"{site.module}.weight")
            if c is not None:
                found.discard(site.module)
                for name, x, shape in ((site.a_name, c.a, site.a_shape), (site.b_name, c.b, site.b_shape)):
                    tensors[name] = _joined(name, x, shape)
        if found:
            raise ManifestError(f"{min(found)} is adapted, which cannot be trained or served here",
                                remedy="Merge the adapter into a plain base instead.")
        check_adapter(text, lora, tensors)
        return lora, tensors


def _joined(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A factor in the shape of its site; one that experts share must be the same for all."""
    if len(shape) == 3 and shape[0] == 1 and x.shape[0] > 1:
        if not bool((x == x[:1]).all()):
            raise ManifestError(f"{name} differs between experts, which share one factor here",
                                remedy="Merge the adapter into a plain base instead.")
        x = x[:1]
    elif len(shape) == 3 and x.shape[0] == 1 and shape[0] > 1:
        x = x.expand(shape)
    return x.reshape(shape).clone()


def write_peft(folder: Path, text: TextConfig, lora: LoraConfig, tensors: Mapping[str, Tensor],
               layout: PeftLayout) -> None:
    """Write an exported adapter as PEFT would: adapter_model.safetensors and adapter_config.json. Factors that experts
    share are repeated. Raises as tidemill.model.lora.check_adapter does."""
    check_adapter(text, lora, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    out: dict[str, Tensor] = {}
    for site in sites(text, lora):
        a, b = tensors[site.a_name], tensors[site.b_name]
        if site.group != "experts":
            out |= {site.a_name: a, site.b_name: b}
            continue
        a, b = (x.expand(text.num_experts, *x.shape[1:]) for x in (a, b))
        if layout == "per-expert":
            for e in range(text.num_experts):
                out[expert_name(site.module, e, "lora_A.weight")] = a[e]
                out[expert_name(site.module, e, "lora_B.weight")] = b[e]
        else:
            module, _, weight = site.module.rpartition(".")
            prefix = module + ".base_layer" * (len(EXPERT_WEIGHTS) - 1 - EXPERT_WEIGHTS.index(weight))
            out[f"{prefix}.lora_A.weight"] = a.flatten(0, 1)
            out[f"{prefix}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    write_tensors(folder / WEIGHTS, ((PREFIX + name, x) for name, x in out.items()))
    config = peft_config(lora)
    if layout == "target_parameters" and "experts" in lora.targets:
        config["target_modules"] = [name for name in config["target_modules"] if name not in EXPERT_WEIGHTS]
        config["target_parameters"] = [f"experts.{name}" for name in EXPERT_WEIGHTS]
    write_json(folder / CONFIG, config)


def read_peft(folder: Path, text: TextConfig) -> PeftAdapter:
    """Read an adapter in any of the layouts (factors are views of the mapped file).

    ManifestError or IntegrityError naming file and tensor if it is not plain LoRA, does not fit the model, is
    incomplete or not finite.
    """
    config, file = _read_config(folder / CONFIG), TensorFile(folder / WEIGHTS)
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    stacks = _targeted(config)
    halves: dict[tuple[str, int | None], dict[str, Tensor]] = {}
    for raw in file.names():
        match = _FACTOR.match(raw.removeprefix(PREFIX).removeprefix(TEXT_PREFIX))
        if match is None:
            raise ManifestError(f"{file.path}: {raw} is no factor of a LoRA adapter")
        x = file.tensor(raw)
        if not bool(torch.isfinite(x).all()):
            raise IntegrityError(f"{file.path}: {raw} holds NaN or infinity")
        key = _weight_of(match[1], stacks)
        if key is None:
            raise ManifestError(f"{file.path}: {raw} belongs to a parameter that target_parameters does not name")
        if _NESTED.match(match[1]):
            x = _unstacked(x, text.num_experts, match[2], f"{file.path}: {raw}")
        halves.setdefault(key, {})[match[2]] = x
    specs = inventory(text)
    corrections = {name: _correction(file.path, specs.get(name), name, parts, rank)
                   for name, parts in _by_weight(halves).items()}
    if not corrections:
        raise ManifestError(f"{file.path} holds no tensors")
    return PeftAdapter(rank, alpha, corrections)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        data = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        kind, rank, alpha = data["peft_type"], data["r"], data["lora_alpha"]
    except OSError as e:
        raise ManifestError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError) as e:
        raise ManifestError(f"{path} is malformed: {e!r}") from e
    if kind != "LORA" or not isinstance(rank, int) or rank < 1 or not math.isfinite(alpha):
        raise ManifestError(f"{path}: peft_type {kind!r}, r {rank!r}, lora_alpha {alpha!r}: expected 'LORA', a rank of "
                            "at least 1 and a finite number")
    for name, allowed in _NEUTRAL.items():
        if data.get(name) not in allowed:
            raise ManifestError(f"{path}: {name} = {data[name]!r}: only plain LoRA can be read here",
                                remedy="Merge it with PEFT and convert the merged model.")
    return data


def _targeted(config: Mapping[str, Any]) -> list[str]:
    """Which of the stacks target_parameters names, innermost first: PEFT wraps in the order of the module."""
    found = {str(name).rpartition(".")[2] for name in config.get("target_parameters") or ()}
    return [name for name in EXPERT_WEIGHTS if name in found]


def _weight_of(module: str, stacks: list[str]) -> tuple[str, int | None] | None:
    """(weight in the inventory, expert) of a module's factors; None for a wrapper of an unnamed parameter."""
    nested, expert = _NESTED.match(module), _EXPERT.match(module)
    if nested:
        depth = nested[2].count(".base_layer")
        return (f"{nested[1]}.{stacks[-1 - depth]}", None) if depth < len(stacks) else None
    if expert:
        return f"{expert[1]}.{expert[3]}", int(expert[2])
    return (module if _STACK.match(module) else f"{module}.weight"), None


def _unstacked(x: Tensor, experts: int, half: str, where: str) -> Tensor:
    """A factor of target_parameters as [E, r, in] or [E, out, r]."""
    axis = 0 if half == "A" else 1
    if x.dim() != 2 or x.shape[axis] % experts:
        raise ManifestError(f"{where} is {list(x.shape)}, which does not hold {experts} experts")
    if half == "A":
        return x.unflatten(0, (experts, -1))
    return x.unflatten(1, (-1, experts)).permute(2, 0, 1)


def _by_weight(halves: Mapping[tuple[str, int | None], dict[str, Tensor]],
               ) -> dict[str, dict[int | None, dict[str, Tensor]]]:
    out: dict[str, dict[int | None, dict[str, Tensor]]] = {}
    for (name, expert), parts in halves.items():
        out.setdefault(name, {})[expert] = parts
    return out


def _correction(path: Path, spec: TensorSpec | None, name: str, parts: dict[int | None, dict[str, Tensor]],
                rank: int) -> Correction:
    """The factors of one weight, joined over experts and checked against its shape."""
    if spec is None or len(spec.shape) not in (2, 3):
        raise ManifestError(f"{path}: the model has no weight {name} to adapt")
    experts = spec.shape[0] if spec.is_expert else 1
    wanted = [None] if None in parts else list(range(experts))
    if (not spec.is_expert and None not in parts) or set(parts) != set(wanted):
        raise ManifestError(f"{path}: {name} has factors for {len(parts)} of {experts} experts")
    lacking = [half for e in wanted for half in "AB" if half not in parts[e]]
    if lacking:
        raise ManifestError(f"{path}: lora_{lacking[0]} of {name} is missing")
    a, b = (_stacked([parts[e][half] for e in wanted]) for half in "AB")
    outputs, inputs = spec.shape[-2:]
    fits = a.shape[1:] == (rank, inputs) and b.shape[1:] == (outputs, rank)
    if not fits or any(x.shape[0] not in (1, experts) for x in (a, b)):
        raise ManifestError(f"{path}: the factors of {name} are {list(a.shape)} and {list(b.shape)}, expected rank "
                            f"{rank} for [{outputs}, {inputs}]")
    return Correction(a, b)


def _stacked(parts: list[Tensor]) -> Tensor:
    if len(parts) > 1:
        return torch.stack(parts)
    return parts[0] if parts[0].dim() == 3 else parts[0].unsqueeze(0)


def merge_into(model: CausalLM, adapter: PeftAdapter) -> None:
    """Add alpha / rank · B A to every adapted weight in place, summed in fp32 and rounded once to the model's dtype."""
    state = model.state_dict()
    with torch.no_grad():
        for name, correction in adapter.corrections.items():
            for e, w in _matrices(state[name]):
                w.copy_(w.float() + adapter.alpha / adapter.rank * correction.of(e))


def _matrices(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    yield from enumerate(x if x.dim() == 3 else x.unsqueeze(0))


def merge(base: Path, adapter: Path, target: Path) -> BaseManifest:
    """Write the model of folder `base` with an adapter merged in as the new folder `target`.

    InputError if the base has packed experts: merging would quantise them anew, and the result would not be the model
    that was trained. Otherwise raises as BaseStore.open and read_peft do.
    """
    store = BaseStore.open(base)
    text = store.config.text_config
    if text.quantize_experts:
        plain = "bf16" if text.dtype == "bfloat16" else "f32"
        raise InputError(f"{base} has packed MXFP4 experts, into which no adapter can be merged without loss",
                         field="base", remedy=f"First: tidemill model convert {base} DST --experts {plain}.")
    if target.exists() and any(target.iterdir()):
        raise InputError(f"{target} exists and is not empty", field="target", remedy="Name a new folder.")
    found = read_peft(adapter, text)
    model = store.model()
    merge_into(model, found)
    target.mkdir(parents=True, exist_ok=True)
    copy_companions(base, target)
    return write_base(target, model)
