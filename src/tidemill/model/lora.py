"""Low-rank adapters on a frozen base: which tensors exist, attaching them for training, exporting, loading, proving.

Target groups and sharing follow the K3 RL setting: gate and up projections share one A; all experts of a layer share
one A for w1 and w3 and one B for w2. Names are PEFT's (`{module}.lora_A.weight`); a shared factor is exported under
every module it belongs to. delta = (alpha / rank) · B A x, never merged into the base.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Generator, Tensor, nn

from tidemill.core.config import require, strict_config
from tidemill.core.digests import digest_json
from tidemill.core.engine_api import AdapterConfig
from tidemill.core.errors import ConfigError, IntegrityError, ManifestError
from tidemill.core.manifest import AdapterManifest
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import TextConfig
from tidemill.model.layers import Linear, RoutedExperts
from tidemill.model.tensor_bytes import dtype_name, tensor_digest, tensor_entry

TARGETS = ("attn_out", "mla_down", "dense", "experts", "shared_experts")
"""Groups of adapted modules: attention outputs, MLA down-projections, dense blocks, routed and shared experts."""

_EXPERTS = ("w1", "w2", "w3")


@strict_config
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """How a base is adapted."""

    rank: int = 8
    alpha: float = 16.0
    """The correction is scaled by alpha / rank."""
    targets: tuple[str, ...] = TARGETS
    """Groups out of `TARGETS`, each once."""
    dtype: str = "float32"
    """dtype of the factors, trained and exported."""

    def __post_init__(self) -> None:
        require(self.rank >= 1, field="rank", value=self.rank, expected="at least 1")
        require(math.isfinite(self.alpha) and self.alpha > 0, field="alpha", value=self.alpha,
                expected="a number above 0")
        unknown = [t for t in self.targets if t not in TARGETS]
        require(not unknown and bool(self.targets) and len(set(self.targets)) == len(self.targets), field="targets",
                value=list(self.targets), expected=f"one or more of {', '.join(TARGETS)}, each once")
        require(self.dtype in ("float32", "bfloat16"), field="dtype", value=self.dtype,
                expected="'float32' or 'bfloat16'")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def digest(self) -> str:
        """Digest of rank, alpha, targets (in any order) and dtype."""
        return digest_json(asdict(self) | {"targets": sorted(self.targets)})

    def to_adapter_config(self) -> AdapterConfig:
        """The form that crosses the engine's border."""
        return AdapterConfig(rank=self.rank, alpha=self.alpha, targets=self.targets, dtype=self.dtype)

    @classmethod
    def from_adapter_config(cls, config: AdapterConfig) -> LoraConfig:
        """Raises ConfigError on unknown targets or bad numbers."""
        return cls(rank=config.rank, alpha=config.alpha, targets=config.targets, dtype=config.dtype)


@dataclass(frozen=True, slots=True)
class Site:
    """One adapted map: module name, group, shapes of its exported factors, and the site whose A (or B) it shares (''
    : own)."""

    module: str
    group: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    shares_a_with: str = ""

    @property
    def a_name(self) -> str:
        return f"{self.module}.lora_A.weight"

    @property
    def b_name(self) -> str:
        return f"{self.module}.lora_B.weight"


def sites(text: TextConfig, lora: LoraConfig) -> Iterator[Site]:
    """Every adapted map in model order. Routed experts: A of w1 and w3 [1, r, l] (one tensor), B [E, I, r]; A of w2
    [E, r, I], B [1, l, r]. All others: A [r, in], B [out, r]."""
    for layer in range(text.num_hidden_layers):
        yield from (site for site in _layer_sites(text, lora.rank, layer) if site.group in lora.targets)


def _layer_sites(c: TextConfig, r: int, layer: int) -> Iterator[Site]:
    prefix, d = f"model.layers.{layer}.", c.hidden_size
    is_mla = layer in c.mla_layers
    width = c.num_attention_heads * c.v_head_dim if is_mla else c.linear_attn_config.width
    if is_mla:
        if c.q_lora_rank is not None:
            yield Site(f"{prefix}self_attn.q_a_proj", "mla_down", (r, d), (c.q_lora_rank, r))
        latent = c.kv_lora_rank + c.qk_rope_head_dim
        yield Site(f"{prefix}self_attn.kv_a_proj_with_mqa", "mla_down", (r, d), (latent, r))
    yield Site(f"{prefix}self_attn.o_proj", "attn_out", (r, width), (d, r))
    if layer not in c.moe_layers:
        yield from _glu_sites(f"{prefix}mlp.", "dense", d, c.intermediate_size, r)
        return
    experts = f"{prefix}block_sparse_moe.experts."
    count, latent, inner = c.num_experts, c.expert_width, c.moe_intermediate_size
    yield Site(experts + "w1", "experts", (1, r, latent), (count, inner, r))
    yield Site(experts + "w3", "experts", (1, r, latent), (count, inner, r), shares_a_with=experts + "w1")
    yield Site(experts + "w2", "experts", (count, r, inner), (1, latent, r))
    shared = f"{prefix}block_sparse_moe.shared_experts."
    yield from _glu_sites(shared, "shared_experts", d, c.shared_intermediate_size, r)


def _glu_sites(prefix: str, group: str, d: int, inner: int, r: int) -> Iterator[Site]:
    yield Site(prefix + "gate_proj", group, (r, d), (inner, r))
    yield Site(prefix + "up_proj", group, (r, d), (inner, r), shares_a_with=prefix + "gate_proj")
    yield Site(prefix + "down_proj", group, (r, inner), (d, r))


def adapter_shapes(text: TextConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every exported tensor by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for site in sites(text, lora):
        shapes[site.a_name], shapes[site.b_name] = site.a_shape, site.b_shape
    return shapes


def attach(model: CausalLM, lora: LoraConfig, *, seed: int = 0) -> list[nn.Parameter]:
    """Freeze the model and give it fresh factors: A Xavier-uniform, B zero (the model's function does not change).

    Replaces factors attached before. Returns the trainable parameters, shared ones once, in model order.
    """
    generator = Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for site in sites(model.config.text_config, lora):
        if site.shares_a_with:
            tensors[site.a_name] = tensors[f"{site.shares_a_with}.lora_A.weight"]
        else:
            a = torch.empty(site.a_shape)
            bound = math.sqrt(6.0 / (site.a_shape[-1] + site.a_shape[-2]))
            tensors[site.a_name] = a.uniform_(-bound, bound, generator=generator)
        tensors[site.b_name] = torch.zeros(site.b_shape)
    return _install(model, lora, tensors)


def load_adapter(model: CausalLM, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> list[nn.Parameter]:
    """Freeze the model and attach exported factors (copied). Returns the trainable parameters like `attach`.

    ManifestError naming the tensor if one is missing, unexpected, of another shape or dtype, or if copies of a shared
    factor differ; IntegrityError if one holds NaN or infinity.
    """
    check_adapter(model.config.text_config, lora, tensors)
    return _install(model, lora, tensors)


def check_adapter(text: TextConfig, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise as `load_adapter` does unless `tensors` is exactly an adapter for this model and configuration."""
    shapes = adapter_shapes(text, lora)
    missing = [name for name in shapes if name not in tensors]
    unexpected = [name for name in tensors if name not in shapes]
    if missing or unexpected:
        raise ManifestError(f"adapter does not fit targets {', '.join(lora.targets)}: "
                            + (f"{missing[0]} is missing" if missing else f"{unexpected[0]} is unexpected")
                            + f" ({len(missing)} missing, {len(unexpected)} unexpected)")
    for name, shape in shapes.items():
        x = tensors[name]
        if tuple(x.shape) != shape or dtype_name(x.dtype) != lora.dtype:
            raise ManifestError(f"adapter tensor {name} is {dtype_name(x.dtype)} {list(x.shape)}, "
                                f"expected {lora.dtype} {list(shape)}")
        if not bool(torch.isfinite(x).all()):
            raise IntegrityError(f"adapter tensor {name} holds NaN or infinity")
    for site in sites(text, lora):
        other = f"{site.shares_a_with}.lora_A.weight"
        if site.shares_a_with and not torch.equal(tensors[site.a_name], tensors[other]):
            raise ManifestError(f"adapter tensors {site.a_name} and {other} must be equal (one shared factor)")


def _install(model: CausalLM, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> list[nn.Parameter]:
    detach(model)
    model.requires_grad_(False)
    kind = torch.float32 if lora.dtype == "float32" else torch.bfloat16
    made: dict[str, nn.Parameter] = {}
    modules = dict(model.named_modules())

    def parameter(name: str, *, stacked: bool = True) -> nn.Parameter:
        x = tensors[name].detach().to(kind)
        return nn.Parameter((x if stacked else x.squeeze(0)).clone(memory_format=torch.contiguous_format))

    for site in sites(model.config.text_config, lora):
        parent, _, leaf = site.module.rpartition(".")
        holder = modules[parent]
        expert = isinstance(holder, RoutedExperts)
        shared_a = made.get(f"{site.shares_a_with}.lora_A.weight")
        a = shared_a if shared_a is not None else parameter(site.a_name, stacked=not (expert and leaf != "w2"))
        b = parameter(site.b_name, stacked=not (expert and leaf == "w2"))
        made[site.a_name], made[site.b_name] = a, b
        if expert:
            names = ("lora_a2", "lora_b2") if leaf == "w2" else ("lora_a13", f"lora_b{leaf[1]}")
            setattr(holder, names[0], a)
            setattr(holder, names[1], b)
            holder.lora_scale = lora.scale
        else:
            linear = modules[site.module]
            assert isinstance(linear, Linear)
            linear.attach_lora(a, b, lora.scale)
    return list({id(p): p for p in made.values()}.values())


def detach(model: CausalLM) -> None:
    """Remove all factors; the base stays as it is (and frozen, if it was)."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.lora_a = module.lora_b = None
        elif isinstance(module, RoutedExperts):
            module.lora_a13 = module.lora_b1 = module.lora_b3 = module.lora_a2 = module.lora_b2 = None


def export_adapter(model: CausalLM, lora: LoraConfig) -> dict[str, Tensor]:
    """The attached factors by exported name, detached, in model order; no copies (clone before the next optimizer
    step).

    ManifestError if a site of `lora` has none attached.
    """
    modules = dict(model.named_modules())
    out: dict[str, Tensor] = {}
    for site in sites(model.config.text_config, lora):
        parent, _, leaf = site.module.rpartition(".")
        holder = modules[parent]
        if isinstance(holder, RoutedExperts):
            a = holder.lora_a2 if leaf == "w2" else holder.lora_a13
            b = {"w1": holder.lora_b1, "w2": holder.lora_b2, "w3": holder.lora_b3}[leaf]
        else:
            linear = modules[site.module]
            assert isinstance(linear, Linear)
            a, b = linear.lora_a, linear.lora_b
        if a is None or b is None:
            raise ManifestError(f"{site.module} has no adapter attached")
        out[site.a_name] = a.detach().view(site.a_shape)
        out[site.b_name] = b.detach().view(site.b_shape)
    return out


def build_manifest(tensors: Mapping[str, Tensor], *, version: int, base_digest: str, config_digest: str,
                   created_step: int, previous: str = "") -> AdapterManifest:
    """Hash exported tensors into a manifest. ManifestError if there are none."""
    return AdapterManifest.build(
        version=version, base_digest=base_digest, config_digest=config_digest, created_step=created_step,
        previous=previous, tensors=[tensor_entry(name, x) for name, x in tensors.items()],
    )


def verify_tensors(tensors: Mapping[str, Tensor], manifest: AdapterManifest, names: Iterable[str] | None = None) -> int:
    """Compare tensors with a manifest: names, shapes, dtypes, bytes (of `names`, or all). Returns how many were hashed.

    ManifestError or IntegrityError naming the first tensor that is missing, unexpected or different.
    """
    listed = {t.name: t for t in manifest.tensors}
    for name in (*listed, *tensors):
        if name not in tensors or name not in listed:
            where = "missing" if name not in tensors else "not in the manifest"
            raise ManifestError(f"adapter v{manifest.version}: {name} is {where}")
    count = 0
    for name in listed if names is None else names:
        entry, x = listed[name], tensors[name]
        if (entry.dtype, entry.shape) != (dtype_name(x.dtype), tuple(x.shape)):
            raise ManifestError(f"adapter v{manifest.version}: {name} has not the dtype or shape of its manifest")
        if tensor_digest(x) != entry.sha256:
            raise IntegrityError(f"adapter v{manifest.version}: the bytes of {name} are not what its manifest says")
        count += 1
    return count


def require_same_targets(found: LoraConfig, wanted: LoraConfig) -> None:
    """ConfigError if an adapter was made for other targets or another rank than expected."""
    if set(found.targets) != set(wanted.targets) or found.rank != wanted.rank:
        raise ConfigError(f"adapter has rank {found.rank} on {', '.join(sorted(found.targets))}; expected rank "
                          f"{wanted.rank} on {', '.join(sorted(wanted.targets))}", field="targets")
