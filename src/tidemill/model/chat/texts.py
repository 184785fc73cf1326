"""The fixed sentences around tool declarations, effort, tool choice and response formats.

Our own models use the short sentences of OWN_TEXTS. The released K3 uses sentences of its own, published with its
checkpoint; give them as a JSON file, and `is_published` proves by length and digest that they are the ones K3 was
trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.core.config import parse_config, strict_config
from tidemill.core.errors import ConfigError

EFFORTS = ("low", "high", "max")


@strict_config
@dataclass(frozen=True, kw_only=True)
class InstructionTexts:
    """Bodies of the system messages the codec writes itself."""

    effort: Mapping[str, str] = field(default_factory=dict[str, str])
    """Body of the thinking-effort message by effort; an effort that is absent writes no message."""
    default_effort: str = ""
    """Effort when a request names none; empty: no message."""
    static_tools: str
    """Before the JSON of the request's tools; ends with the opening fence and a newline."""
    dynamic_tools: str
    """The same for tools that a system message adds."""
    choice_required: str
    choice_none: str
    format_object: str
    format_schema: str
    """Before the JSON of a schema (in a fence of its own)."""

    @classmethod
    def load(cls, path: Path) -> InstructionTexts:
        """Read a JSON file of these fields. Raises ConfigError."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise ConfigError(f"cannot read the instruction texts {path}: {e}", field="texts") from e
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a JSON object", field="texts")
        return parse_config(cls, data, source=str(path))

    def is_published(self) -> bool:
        """Whether every text equals the one released with K3, byte for byte."""
        texts = {f"effort.{k}": v for k, v in self.effort.items()} | {
            "static_tools": self.static_tools, "dynamic_tools": self.dynamic_tools,
            "choice_required": self.choice_required, "choice_none": self.choice_none,
            "format_object": self.format_object, "format_schema": self.format_schema,
        }
        found = {k: (len(v.encode()), hashlib.sha256(v.encode()).hexdigest()) for k, v in texts.items()}
        return found == K3_TEXT_DIGESTS


OWN_TEXTS = InstructionTexts(
    effort={effort: f"Thinking effort: {effort}." for effort in EFFORTS},
    static_tools="Tools:\n```json\n",
    dynamic_tools="More tools:\n```json\n",
    choice_required="Call at least one tool.",
    choice_none="Call no tool.",
    format_object="Answer with one JSON object and nothing else.",
    format_schema="Answer with JSON that matches this schema and nothing else:\n",
)

K3_TEXT_DIGESTS: Mapping[str, tuple[int, str]] = {
    "effort.low": (223, "003035f6bf61ffe6180f4bd5e5a12df1a7cc0cf4550ef78f5591ce8a4537f5fe"),
    "effort.high": (224, "a8513c631231c09d25027f0e0439194e4290e755fb20932c9f49dd7fa9d6ffc0"),
    "effort.max": (223, "20389202b5a9e0b3b556c90431fb62dc2f1bdb13a6e23fb7b516a3c2da848580"),
    "static_tools": (72, "bbd0773d27b2a814a023a7a142c098958b170dbad77e461b286844512b5b74e7"),
    "dynamic_tools": (188, "b5f3063ffeff6dab49436f59a41291fbdc826cc76653f98f26c514cd7cf7b74a"),
    "choice_required": (91, "e2c3dc236d94164ab96601b3ff7891ad44cdc7d6b38583ab552be33a6bff5f53"),
    "choice_none": (95, "efabd595d24633a14929fd64b8c21542cb13e3e6637ced319c5bec433900a2bb"),
    "format_object": (162, "a88696fd119e35cae2c9cb15ed5a8230bedb9f46e07231f9f85e893e0f993b84"),
    "format_schema": (218, "35c44c528f6c1e2254d8f2e06a68b56506c231c2f4f0ce19617255a8102ebabe"),
}
"""UTF-8 length and SHA-256 of each text as released with K3."""
