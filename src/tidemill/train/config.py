"""Everything a reinforcement learning run can be told, validated at the door.

A recipe is a YAML file of RunConfig; `tidemill rl run NAME` finds it among the package's recipes, a path is taken as it
is, and `--set key.path=value` changes single values before validation. Unknown keys fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tidemill.core.config import parse_config, require, require_positive, strict_config
from tidemill.train.algorithms import ADVANTAGES, AGGREGATIONS, LOSSES
from tidemill.train.recipe_files import packaged_recipes, read_recipe


def _share(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        require(0 <= value <= 1, field=name, value=value, expected="a number from 0 to 1")


@strict_config
@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The architecture. The vocabulary size follows from the tokenizer."""

    preset: str = "toy"
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the preset's text configuration to change."""


@strict_config
@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """What is learned. `name` is a registered task or `module:object`."""

    name: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@strict_config
@dataclass(frozen=True, kw_only=True)
class AgentSection:
    """Limits of one episode. Tokens count the whole episode unless said otherwise."""

    scaffold: Literal["forced", "free"] = "forced"
    """forced: the grammar around the policy's choices is given, not sampled; free: the policy writes everything."""
    max_turns: int = 2
    max_sampled_tokens: int = 48
    max_model_len: int = 192
    tool_timeout_s: float = 5.0
    tool_output_bytes: int = 256
    concurrency: int = 128
    """Episodes under way at once."""

    def __post_init__(self) -> None:
        require_positive(self, "max_turns", "max_sampled_tokens", "max_model_len", "tool_timeout_s",
                         "tool_output_bytes", "concurrency")


@strict_config
@dataclass(frozen=True, kw_only=True)
class SandboxSection:
    """Where tools run. `pool` sandboxes are shared by all episodes in turn, one episode at a time, reset in between."""

    backend: str = "gvisor"
    template: str = "base"
    pool: int = 32

    def __post_init__(self) -> None:
        require_positive(self, "pool")


@strict_config
@dataclass(frozen=True, kw_only=True)
class WarmupSection:
    """Supervised warm-up on demonstrations, stopped early on purpose inside `band`."""

    ranks: int = 1
    """Processes that share every step; each computes on its own core. Another number changes rounding only."""
    max_steps: int = 400
    episodes: int = 16
    """Whole demonstrations per step."""
    drills: int = 64
    """Short copy exercises per step, for tasks that offer them; a young model learns to copy from many of these."""
    lr: float = 4e-3
    weight_decay: float = 0.0
    check_every: int = 10
    check_n: int = 128
    """Dev demonstrations looked at in each check."""
    stop_at: float = 0.25
    """Stop as soon as this share of dev demonstrations, and no more than `band` allows, is what greedy decoding would
    write, token for token, and ..."""
    drill_at: float = 0.0
    """... a drill is sampled correctly with this mean probability (temperature 1; 0: not asked for)."""
    band: tuple[float, float] = (0.10, 0.45)
    """Greedy dev accuracy on the packed base must lie here, else the run stops and says so."""

    def __post_init__(self) -> None:
        require_positive(self, "ranks", "max_steps", "episodes", "lr", "check_every", "check_n")
        require(self.drills >= 0, field="drills", value=self.drills, expected="an integer >= 0")
        _share(self, "stop_at", "drill_at")
        low, high = self.band
        require(0 <= low < high <= 1, field="band", value=self.band, expected="two shares, the lower first")
        require(low <= self.stop_at <= high, field="stop_at", value=self.stop_at, expected=f"inside band {self.band}")


@strict_config
@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Adapter: rank, alpha (scale = alpha / rank) and target groups of tidemill.model.lora."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attn_out", "mla_down", "dense", "experts", "shared_experts")

    def __post_init__(self) -> None:
        require_positive(self, "rank", "alpha")


@strict_config
@dataclass(frozen=True, kw_only=True)
class RlSection:
    """The update. One optimizer step per rollout, so the clip only acts with `epochs` > 1."""

    max_steps: int = 100
    prompts: int = 32
    """Prompt groups in one optimizer step."""
    samples: int = 8
    """Episodes per prompt (G)."""
    lr: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    temperature: float = 1.0
    advantage: str = "grpo"
    loss: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    aggregation: str = "token-mean"
    epochs: int = 1
    dynamic_rounds: int = 4
    """Generation rounds at most to collect `prompts` groups whose rewards differ; 0: train on whatever came."""
    overlong_buffer: int = 0
    """Last sampled tokens before the limit that are penalised; 0: no penalty."""
    tis_cap: float = 2.0
    """Cap of the truncated importance weight p_trainer / p_engine; 0: no correction."""
    kl_coef: float = 0.0
    """Weight of k3(policy || base) in the loss; 0: no reference."""
    micro_batch_tokens: int = 16_384
    """Padded tokens of one forward and backward pass."""

    def __post_init__(self) -> None:
        require_positive(self, "max_steps", "prompts", "lr", "grad_clip", "epochs", "micro_batch_tokens",
                         "temperature")
        require(self.samples >= 2, field="samples", value=self.samples, expected="at least 2, for a baseline")
        for name, table in (("advantage", ADVANTAGES), ("loss", LOSSES), ("aggregation", AGGREGATIONS)):
            value = getattr(self, name)
            require(value in table, field=name, value=value, expected="one of " + ", ".join(table))
        for name in ("dynamic_rounds", "overlong_buffer", "tis_cap", "kl_coef", "weight_decay"):
            require(getattr(self, name) >= 0, field=name, value=getattr(self, name), expected="a number >= 0")
        _share(self, "clip_low")
        require(self.clip_high > 0, field="clip_high", value=self.clip_high, expected="a number above 0")


@strict_config
@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Greedy evaluation. Stopping looks at the dev split only; the test split is evaluated exactly twice."""

    every: int = 5
    dev_n: int = 256
    test_n: int = 1024
    stop_at: float = 0.97
    """Stop when dev accuracy reaches this at `patience` evaluations in a row."""
    patience: int = 2

    def __post_init__(self) -> None:
        require_positive(self, "every", "dev_n", "test_n", "patience")
        require(self.stop_at > 0, field="stop_at", value=self.stop_at, expected="a share above 0 (above 1: never)")


@strict_config
@dataclass(frozen=True, kw_only=True)
class CanarySection:
    """Fixed token sequences scored by engine and trainer after every sync. All differences are in nats per token."""

    sequences: int = 16
    floor_factor: float = 10.0
    repeat_factor: float = 10.0
    absolute: float = 1e-3
    """The threshold is max(floor_factor x floor, repeat_factor x repeatability, absolute)."""
    moved_factor: float = 5.0
    """The trainer counts as moved when its log-probs changed by more than this many thresholds."""
    consecutive: int = 2
    """Steps in a row that must fire before the run is stopped."""

    def __post_init__(self) -> None:
        require_positive(self, "sequences", "floor_factor", "repeat_factor", "absolute", "moved_factor",
                         "consecutive")


@strict_config
@dataclass(frozen=True, kw_only=True)
class ControlSection:
    """A run that is wrong on purpose, and what must happen to it."""

    steps: int
    """Steps to run at most."""
    expect: Literal["canary-stops", "sync-refused", "flat"]
    """canary-stops: the canary ends the run; sync-refused: the engine refuses the adapter and keeps the old version;
    flat: dev accuracy does not rise by more than `tolerance`."""
    tolerance: float = 0.10

    def __post_init__(self) -> None:
        require_positive(self, "steps")
        _share(self, "tolerance")


CONTROLS = ("frozen-engine", "random-reward", "zero-scale", "bit-flip")


@strict_config
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    name: str
    about: str = ""
    seed: int = 1
    threads: int = 1
    """torch threads. Resume is bit-equal at 1 only."""
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection
    agent: AgentSection = field(default_factory=AgentSection)
    sandbox: SandboxSection = field(default_factory=SandboxSection)
    warmup: WarmupSection = field(default_factory=WarmupSection)
    lora: LoraSection = field(default_factory=LoraSection)
    rl: RlSection = field(default_factory=RlSection)
    eval: EvalSection = field(default_factory=EvalSection)
    canary: CanarySection = field(default_factory=CanarySection)
    controls: dict[str, ControlSection] = field(default_factory=dict[str, ControlSection])
    checkpoint_every: int = 5
    sync_chunk_bytes: int = 65_536
    """Largest chunk of an adapter transfer; a single tensor above it is a chunk of its own."""
    sleep_engine: bool = True
    """Free the engine's pools while the trainer works."""

    def __post_init__(self) -> None:
        require_positive(self, "threads", "checkpoint_every", "sync_chunk_bytes")
        for name in self.controls:
            require(name in CONTROLS, field="controls", value=name, expected="one of " + ", ".join(CONTROLS))


def recipe_names() -> list[str]:
    """Recipes that come with the package."""
    return list(packaged_recipes("tidemill.train"))


def load_recipe(name: str, overrides: Sequence[str] = (), *, seed: int | None = None) -> RunConfig:
    """A packaged recipe by name, or a YAML file by path, with overrides applied before validation."""
    data = read_recipe(name, packaged_recipes("tidemill.train"), overrides, seed=seed, offered=recipe_names(),
                       remedy="`tidemill rl list` shows the recipes.")
    return parse_config(RunConfig, data, source=name)
