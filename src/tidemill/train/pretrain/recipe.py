"""Everything a pretraining or fine-tuning can be told, validated at the door.

A recipe is a YAML file; `tidemill train pretrain NAME` and `tidemill train sft NAME` find it among the package's
recipes, a path is taken as it is, and `--set key.path=value` changes single values. Unknown keys fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tidemill.core.config import load_yaml, parse_config, require, require_positive, strict_config
from tidemill.core.errors import ConfigError
from tidemill.train.config import ModelSection
from tidemill.train.pretrain.parameters import OptimizerSection
from tidemill.train.pretrain.schedule import ScheduleSection
from tidemill.train.pretrain.sources import SourceSection
from tidemill.train.recipe_files import packaged_recipes, read_recipe

Kind = Literal["pretrain", "sft"]
_PACKAGE = "tidemill.train.pretrain"


@strict_config
@dataclass(frozen=True, kw_only=True)
class VocabularySection:
    """A byte-level BPE trained on the recipe's own documents, in the proportions of the mixture."""

    size: int = 2048
    """Ids, control tokens included."""
    num_bytes: int = 8_000_000
    """About how much text it is trained on."""

    def __post_init__(self) -> None:
        require(self.size >= 512, field="vocabulary.size", value=self.size, expected="at least 512")
        require_positive(self, "num_bytes", prefix="vocabulary.")


@strict_config
@dataclass(frozen=True, kw_only=True)
class HeldOutSection:
    """Documents kept from training, and how often the model is measured on them."""

    share: float = 0.02
    """Of the documents of files; chosen by their digests."""
    every: int = 100
    """Steps between measurements; the last step is followed by one in any case."""
    tokens: int = 20_000
    """Of each source at most, in the measurements before the last one."""
    last_tokens: int = 200_000
    """The same in the last one."""

    def __post_init__(self) -> None:
        require(0 <= self.share < 1, field="held_out.share", value=self.share, expected="a share below 1")
        for name in ("every", "tokens", "last_tokens"):
            value = getattr(self, name)
            require(value >= 1, field=f"held_out.{name}", value=value, expected="at least 1")


@strict_config
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training.

    pretrain  a new model of `model`, with a vocabulary of its own
    sft       goes on from `init`: a model folder, or the name of a model that comes with the package
    """

    kind: Kind
    name: str
    about: str = ""
    seed: int = 1
    threads: int = 1
    """torch threads of each rank. Resume is bit-equal at 1 only."""
    ranks: int = 1
    """Processes that share every step. Another number changes rounding only."""
    model: ModelSection | None = None
    vocabulary: VocabularySection | None = None
    init: str = ""
    data: tuple[SourceSection, ...]
    context: int = 512
    """Longest sequence in tokens; what is longer is cut."""
    batch_tokens: int = 8192
    """Tokens of an optimizer step, all ranks together; up to a context more."""
    micro_batch_tokens: int = 4096
    """Tokens of one forward and backward pass."""
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection
    held_out: HeldOutSection = field(default_factory=HeldOutSection)
    mxfp4_from: float = 0.0
    """Share of the steps after which experts compute on the MXFP4 grid they will be stored on. 0: always; 1: never."""
    quantization: Literal["weights", "weights+activations"] = "weights"
    """What is rounded then: the experts' weights alone, as the engine computes, or K3's scheme, which rounds their
    inputs through MXFP8 too."""
    checkpoint_s: float = 120.0
    """Seconds between checkpoints."""

    def __post_init__(self) -> None:
        require_positive(self, "threads", "ranks", "batch_tokens", "micro_batch_tokens", "checkpoint_s")
        require(self.context >= 2, field="context", value=self.context, expected="at least 2")
        require(0 <= self.mxfp4_from <= 1, field="mxfp4_from", value=self.mxfp4_from, expected="a share from 0 to 1")
        names = [source.name for source in self.data]
        require(bool(names) and len(set(names)) == len(names), field="data", value=names,
                expected="at least one source, names all different")
        if self.kind == "pretrain":
            require(self.model is not None and self.vocabulary is not None and not self.init, field="model, vocabulary",
                    value=self.init, expected="model and vocabulary, no init, in a recipe of kind pretrain")
        else:
            require(bool(self.init) and self.model is None and self.vocabulary is None, field="init", value=self.init,
                    expected="a model to go on from, and neither model nor vocabulary, in a recipe of kind sft")
            text = [source.name for source in self.data if source.text]
            require(not text, field="data", value=text, expected="conversations and tasks only in a recipe of kind sft")


def recipe_names(kind: Kind | None = None) -> list[str]:
    """Recipes that come with the package, of one kind or all."""
    found = packaged_recipes(_PACKAGE)
    return [name for name, path in found.items() if kind is None or load_yaml(path).get("kind") == kind]


def load_recipe(name: str, overrides: Sequence[str] = (), *, kind: Kind | None = None,
                seed: int | None = None) -> Recipe:
    """A packaged recipe by name, or a YAML file by path, with overrides applied before validation. ConfigError, also
    if it is not of `kind`."""
    data = read_recipe(name, packaged_recipes(_PACKAGE), overrides, seed=seed, offered=recipe_names(kind))
    recipe = parse_config(Recipe, data, source=name)
    if kind is not None and recipe.kind != kind:
        raise ConfigError(f"{name}: kind = {recipe.kind!r}: expected {kind!r}", field="kind",
                          remedy=f"Run it with tidemill train {recipe.kind}.")
    return recipe
