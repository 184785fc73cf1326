"""The token log: what was really put into and sampled from the model, token by token.

Training reads ids, log-probs, masks and versions from here and never from text (docs/architecture.md, "token in, token
out").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenLog:
    """Parallel lists, one entry per token.

    ids       token ids in order
    sampled   True where the policy sampled the token (enters the loss), False where it was given
    logprobs  natural log of the sampling distribution's probability; 0.0 where not sampled
    versions  policy version that sampled the token; -1 where not sampled
    """

    ids: list[int] = field(default_factory=list[int])
    sampled: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    def __len__(self) -> int:
        return len(self.ids)

    def give(self, ids: Sequence[int]) -> None:
        """Append tokens the policy did not choose (prompt, tool results, forced scaffolding)."""
        n = len(ids)
        self.ids.extend(ids)
        self.sampled.extend([False] * n)
        self.logprobs.extend([0.0] * n)
        self.versions.extend([-1] * n)

    def sample(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Append sampled tokens with their behaviour log-probs and policy versions (equal lengths, else ValueError)."""
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(f"lengths differ: {len(ids)} ids, {len(logprobs)} logprobs, {len(versions)} versions")
        self.ids.extend(ids)
        self.sampled.extend([True] * len(ids))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy chose."""
        return sum(self.sampled)

    def to_json(self) -> dict[str, object]:
        """Plain lists for JSONL files."""
        return {"ids": self.ids, "sampled": [int(s) for s in self.sampled], "logprobs": self.logprobs,
                "versions": self.versions}
