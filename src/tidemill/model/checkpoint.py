"""A checkpoint in Hugging Face layout, opened without reading it and read one tensor at a time.

Whatever the folder looks like - one file or shards, names with or without `language_model.`, routed experts packed or
plain, one by one or stacked, A_log padded or not - tensors come out under the names, shapes and dtypes of
tidemill.model.inventory. How experts are stored is decided by which tensors are there, never by config.json. Vision
tensors are recognised by name and kept aside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tidemill.core.errors import IntegrityError, ManifestError
from tidemill.kernels import mxfp4
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import ModelConfig
from tidemill.model.inventory import TensorSpec, inventory, vision_inventory
from tidemill.model.names import TEXT_PREFIX, ExpertForm, FileTensor, expert_form, is_vision, split_stacked
from tidemill.model.shards import open_shards
from tidemill.model.tensor_bytes import TensorFile, TensorPlan

_FLOATS = ("float32", "bfloat16", "float16")
_CHUNK = 1 << 20
_NAN_SCALE = 255
_SHOWN = 3
_DAMAGED = "Copy the file again; if it stays, the model was damaged when it was packed."


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies, and how it is stored."""

    file: TensorFile
    name: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """An opened folder. Holds file descriptors and headers, no weights."""

    def __init__(self, folder: Path, config: ModelConfig, places: dict[str, _Place]) -> None:
        self.folder = folder
        self.specs = inventory(config.text_config)
        self.forms = _forms(folder, config, self.specs, places)
        quantized = any(form.quantized for form in self.forms.values())
        self.config = replace(config, text_config=replace(config.text_config, quantize_experts=quantized))
        """config.json, but with `quantize_experts` as the tensors say."""
        self.vision = {name: TensorPlan(name, p.dtype, p.shape) for name, p in places.items() if is_vision(name)}
        """Tensors of the vision tower and projector, as stored."""
        self.prefixed = any(p.name.startswith(TEXT_PREFIX) for p in places.values())
        """Whether names of the text model begin with `language_model.`."""
        self._places = places
        self._parts: dict[str, dict[str, list[FileTensor]]] = {}
        for spec in self.specs.values():
            kinds = self._parts.setdefault(spec.name, {})
            for part in split_stacked(spec, self._form(spec.name)):
                kinds.setdefault(part.part, []).append(part)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open and compare with config.json. ConfigError, ManifestError or IntegrityError naming file, tensor and
        remedy if a file is missing, cut short or corrupt, or a tensor is missing, unexpected, mis-shaped, of another
        dtype or there twice."""
        config = ModelConfig.read(folder)
        places: dict[str, _Place] = {}
        for raw, file in open_shards(folder).items():
            name = raw.removeprefix(TEXT_PREFIX)
            if name in places:
                raise ManifestError(f"{places[name].name} in {places[name].file.path} and {raw} in {file.path} are the "
                                    "same tensor", remedy="Remove the file that does not belong to this model.")
            places[name] = _Place(file, raw, *file.describe(raw))
        checkpoint = cls(folder, config, places)
        checkpoint._check()
        return checkpoint

    def parts(self, name: str) -> list[FileTensor]:
        """The file tensors of an in-memory tensor, named without `language_model.`. ManifestError for unknown names."""
        self._spec(name)
        return [part for kind in self._parts[name].values() for part in kind]

    def file(self, part: str) -> tuple[TensorFile, str]:
        """The file a tensor (of `parts` or `vision`) lies in, and its name there."""
        place = self._places[part]
        return place.file, place.name

    def files(self) -> list[TensorFile]:
        """The weight files, in the order of their first tensors."""
        return list({id(p.file): p.file for p in self._places.values()}.values())

    def not_as_expected(self) -> list[str]:
        """What `read` would convert: one line per tensor whose stored dtype or shape is not the inventory's."""
        lines = (_difference(part, self._places[part.name]) for name in self.specs for part in self.parts(name))
        return [line for line in lines if line]

    def read(self, name: str, *, expert: int | None = None, dtype: torch.dtype | None = None,
             rounding: bool = False) -> Tensor:
        """A tensor by in-memory name (`expert`: one slice [out, in] of a stack), decoded, as `dtype` (None: the
        inventory's). A new tensor.

        IntegrityError naming file and tensor for NaN or infinity, a NaN scale, padding that is not zero, or, without
        `rounding`, values that `dtype` cannot hold exactly.
        """
        spec = self._spec(name)
        shape = spec.shape if expert is None else spec.shape[1:]
        out = torch.empty(shape, dtype=dtype or getattr(torch, spec.dtype))
        self.read_into(name, out, expert=expert, rounding=rounding)
        return out

    def read_into(self, name: str, out: Tensor, *, expert: int | None = None, rounding: bool = False) -> None:
        """`read` into a contiguous tensor; needs no more memory beside it than one expert and a few chunks."""
        spec = self._spec(name)
        if not spec.is_expert:
            self._read_plain(name, out, rounding)
        elif expert is None:
            for e in range(spec.shape[0]):
                self.read_into(name, out[e], expert=e, rounding=rounding)
        elif self._form(name).quantized:
            out.copy_(mxfp4.decode(*self.packed(name, expert), dtype=out.dtype))
            if not bool(torch.isfinite(out).all()):
                place, _ = self._expert_place(name, "scale", expert)
                raise IntegrityError(f"{place.file.path}: {place.name} has scales that make weights infinite",
                                     remedy=_DAMAGED)
        else:
            place, start = self._expert_place(name, "weight", expert)
            _read_values(place, out, start, rounding)

    def packed(self, name: str, expert: int) -> tuple[Tensor, Tensor]:
        """(packed u8 [out, in/2], scale u8 [out, in/32]) of one quantised expert, as stored. IntegrityError for a NaN
        scale."""
        found: list[Tensor] = []
        for part in ("packed", "scale"):
            place, start = self._expert_place(name, part, expert)
            x = torch.empty(place.shape[-2:], dtype=torch.uint8)
            place.file.read_into(place.name, x, start=start)
            found.append(x)
        packed, scale = found
        if bool((scale == _NAN_SCALE).any()):
            place, _ = self._expert_place(name, "scale", expert)
            raise IntegrityError(f"{place.file.path}: {place.name} holds the scale byte {_NAN_SCALE}, which means NaN",
                                 remedy=_DAMAGED)
        return packed, scale

    def read_vision(self, name: str) -> Tensor:
        """A tensor of `vision`, as stored. IntegrityError for NaN or infinity."""
        plan = self.vision[name]
        out = torch.empty(plan.shape, dtype=getattr(torch, plan.dtype))
        _read_values(self._places[name], out, 0, rounding=False)
        return out

    def fill(self, model: CausalLM, *, rounding: bool = False) -> None:
        """Copy every weight into a model of this configuration, one tensor at a time. `rounding` as in `read`."""
        state = model.state_dict()
        for name in self.specs:
            self.read_into(name, state[name].detach(), rounding=rounding)

    def model(self) -> CausalLM:
        """A model with these weights, packed experts decoded. Beside the model itself it needs the memory of one
        expert and a few chunks."""
        model = CausalLM(self.config, initialise=False)
        self.fill(model)
        return model

    def _spec(self, name: str) -> TensorSpec:
        try:
            return self.specs[name]
        except KeyError:
            raise ManifestError(f"this model has no tensor {name}") from None

    def _form(self, name: str) -> ExpertForm:
        return self.forms.get(name, ExpertForm("per-expert", quantized=False))

    def _expert_place(self, name: str, part: str, expert: int) -> tuple[_Place, int]:
        """Where one expert's part lies, and at which element it begins."""
        parts = self._parts[name][part]
        if parts[0].expert is not None:
            return self._places[parts[expert].name], 0
        return self._places[parts[0].name], expert * math.prod(parts[0].shape[1:])

    def _read_plain(self, name: str, out: Tensor, rounding: bool) -> None:
        place = self._places[name]
        if not name.endswith(".A_log"):
            _read_values(place, out, 0, rounding)
            return
        stored = torch.empty(math.prod(place.shape), dtype=out.dtype)
        _read_values(place, stored, 0, rounding)
        heads = self.config.text_config.linear_attn_config.num_heads
        if bool(stored[heads:].any()):
            raise IntegrityError(f"{place.file.path}: {place.name} has {stored.numel()} entries, and those beyond the "
                                 f"{heads} heads are not zero",
                                 remedy="There is one value per head; the rest is padding.")
        out.zero_()
        out.view(-1)[:heads].copy_(stored[:heads])

    def _check(self) -> None:
        """Raise unless names, shapes and dtypes are those of the configuration."""
        expected = {p.name: p for name in self.specs for p in self.parts(name)}
        missing = [name for name in expected if name not in self._places]
        vision = vision_inventory(self.config.vision_config) if self.config.vision_config else {}
        if self.vision:
            missing += [name for name in vision if name not in self.vision]
        unexpected = [name for name in self._places if name not in expected and name not in self.vision]
        if vision:
            unexpected += [name for name in self.vision if name not in vision]
        wrong: list[str] = []
        for name, place in self._places.items():
            if name in expected:
                problem = self._problem(expected[name], place)
            else:
                spec = vision.get(name)
                problem = spec is not None and (place.shape != spec.shape or place.dtype not in _FLOATS)
            if problem:
                wrong.append(_difference(expected.get(name) or vision[name], place))
        complaints = [*_complain(f"{self.folder}: ", missing, " is missing")]
        if unexpected:
            first = self._places[unexpected[0]].file.path
            complaints += _complain(f"{first}: ", [self._places[name].name for name in unexpected], " is unexpected")
        complaints += _complain("", wrong, "")
        if complaints:
            raise ManifestError("; ".join(complaints),
                                remedy="Check that config.json and the weight files are of the same model.")

    def _problem(self, want: FileTensor, place: _Place) -> bool:
        """Whether a tensor is neither what is expected nor something `read` can convert."""
        if place.dtype != want.dtype and (want.dtype not in _FLOATS or place.dtype not in _FLOATS):
            return True
        if place.shape == want.shape:
            return False
        if want.name.endswith("_conv1d.weight"):
            return place.shape != (want.shape[0], want.shape[2])
        if want.name.endswith(".A_log"):
            count = math.prod(place.shape)
            return max(place.shape, default=0) != count or count < self.config.text_config.linear_attn_config.num_heads
        return True


def _forms(folder: Path, config: ModelConfig, specs: dict[str, TensorSpec],
           places: dict[str, _Place]) -> dict[str, ExpertForm]:
    """How each stack of experts is stored. One of which nothing is there gets the form config.json suggests."""
    seen: dict[str, tuple[ExpertForm, str]] = {}
    for name in places:
        found = expert_form(name)
        if found is None:
            continue
        stack, form = found
        first = seen.setdefault(stack, (form, name))
        if first[0] != form:
            raise ManifestError(f"{folder}: experts of {stack} lie in two forms: {first[1]} and {name}",
                                remedy="Remove the file that does not belong to this model.")
    usual = ExpertForm("per-expert", config.text_config.quantize_experts)
    return {spec.name: seen.get(spec.name, (usual, ""))[0] for spec in specs.values() if spec.is_expert}


def _difference(want: FileTensor | TensorSpec, place: _Place) -> str:
    """How a stored tensor differs from what is expected; empty if it does not."""
    if (place.dtype, place.shape) == (want.dtype, want.shape):
        return ""
    return (f"{place.file.path}: {place.name} is {place.dtype} {list(place.shape)}, expected {want.dtype} "
            f"{list(want.shape)}")


def _complain(before: str, items: Sequence[str], after: str) -> Iterator[str]:
    """The first item in words, and how many more there are, the next few by name."""
    if items:
        more = "" if len(items) == 1 else f" ({len(items)} in all; also {', '.join(items[1:_SHOWN])}" + (
            ", …)" if len(items) > _SHOWN else ")")
        yield f"{before}{items[0]}{after}{more}"


def _read_values(place: _Place, out: Tensor, start: int, rounding: bool) -> None:
    """Fill `out` (contiguous) from element `start` on, chunk by chunk; see Checkpoint.read for what is refused."""
    flat, stored = out.view(-1), getattr(torch, place.dtype)
    for begin in range(0, flat.numel(), _CHUNK):
        target = flat[begin : begin + _CHUNK]
        x = target if stored is out.dtype else torch.empty(target.shape, dtype=stored)
        place.file.read_into(place.name, x, start=start + begin)
        if not bool(torch.isfinite(x).all()):
            raise IntegrityError(f"{place.file.path}: {place.name} holds NaN or infinity",
                                 remedy="Copy the file again; if it stays, the training that wrote it had diverged.")
        if x is target:
            continue
        target.copy_(x)
        if not rounding and not torch.equal(target.to(stored), x):
            kind = str(out.dtype).removeprefix("torch.")
            raise IntegrityError(
                f"{place.file.path}: {place.name} is {place.dtype} and has values that {kind} cannot hold exactly",
                remedy=f"Set dtype to {place.dtype} in config.json, or round once with `tidemill model convert SRC DST "
                       f"--dtype {kind}`.")
