"""How an attempt ended. Infrastructure failures are an outcome of their own: masked from the loss and counted,
never a reward of zero."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Outcome of one episode."""

    OK = "ok"
    """Finished and graded correct."""
    WRONG = "wrong"
    """Finished and graded not correct."""
    TRUNCATED = "truncated"
    """Ran into a token, turn or context limit; graded as it stands."""
    INFRA_ERROR = "infra_error"
    """Engine, sandbox or grader failed; no reward exists."""

    @property
    def trains(self) -> bool:
        """Whether the episode may enter the loss."""
        return self is not Outcome.INFRA_ERROR
