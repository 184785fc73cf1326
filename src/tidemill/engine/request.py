"""What the engine works on: sequences (a log of tokens and what of it is resident) and requests (one generation)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tidemill.core.engine_api import Completion, FinishReason, SamplingParams


class Phase(Enum):
    """WAITING -> RUNNING -> DONE; a preempted request goes back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """A token log and its residency. The log is the truth: residency may be dropped at any time and recomputed.

    ids       every token, given or sampled
    computed  how many leading tokens the slot's state and the pages cover; < len(ids) between steps, because the
              last token is computed by the step that needs what follows it
    slot      state slot, -1 if not resident
    pages     page ids in order of position
    """

    key: str
    ids: list[int] = field(default_factory=list[int])
    computed: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list[int])
    last_used: int = 0
    owner: str = ""
    """Request that works on it, empty if idle."""

    @property
    def resident(self) -> bool:
        return self.slot >= 0


@dataclass(slots=True, eq=False)
class Request:
    """One generation (or scoring) in progress. The engine owns and mutates it."""

    request_id: str
    call_id: int
    sequence: Sequence
    sampling: SamplingParams
    stream: bool
    start: int
    """Length of the log before the given tokens."""
    prompt_end: int
    """Length of the log with the given tokens."""
    wants_scores: bool = False
    """Report log-probs of the given tokens."""
    score_temperature: float = 1.0
    is_score: bool = False
    """The caller wants only the scores, as a tuple of floats."""
    phase: Phase = Phase.WAITING
    arrival: int = 0
    stop_ids: frozenset[int] = frozenset()
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    model_logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])
    scores: list[float] = field(default_factory=list[float])
    """Log-probs of the tokens at positions score_start, score_start + 1, …"""
    counts: dict[int, int] = field(default_factory=dict[int, int])
    """How often each token was sampled by this request; kept only if a penalty needs it."""
    cached: int = -1
    """Tokens that needed no computing when it started; -1 before."""

    @property
    def score_start(self) -> int:
        """First position with a predecessor among the given tokens."""
        return max(self.start, 1)

    @property
    def next_score(self) -> int:
        """Position whose log-prob is wanted next."""
        return self.score_start + len(self.scores)

    @property
    def target(self) -> int:
        """How many tokens must be computed now: all that are known if one is to be sampled, else all but the last."""
        n = len(self.sequence.ids)
        return n if self.sampling.max_tokens > len(self.ids) else n - 1

    def completion(self, reason: FinishReason, error: str = "") -> Completion:
        """The result, from what was sampled so far."""
        scores: tuple[float | None, ...] = ()
        if self.wants_scores:
            missing = [None] * (self.score_start - self.start)
            scores = (*missing, *self.scores)
        return Completion(
            request_id=self.request_id, ids=tuple(self.ids), logprobs=tuple(self.logprobs),
            model_logprobs=tuple(self.model_logprobs), versions=tuple(self.versions), finish_reason=reason,
            prompt_tokens=self.prompt_end, cached_tokens=max(0, self.cached), top=tuple(self.top),
            prompt_logprobs=scores, error=error,
        )
