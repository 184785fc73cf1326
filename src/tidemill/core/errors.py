"""Every error tidemill raises on purpose.

TidemillError
├── InputError (ValueError)        a field the caller gave is wrong; nothing was done
│   ├── ConfigError                a configuration file, recipe, flag or environment variable
│   └── CapacityError              the request is valid but can never fit; carries the arithmetic
├── BusyError                      valid, but not in this state; retry later
├── NotFoundError (KeyError)       an id, name or template that does not exist
├── IntegrityError                 bytes are not what their digest, name or shape says
│   ├── ManifestError              a manifest, adapter or checkpoint is incomplete or contradictory
│   └── StaleVersionError          a version that is not newer than the one served
├── EngineError                    the serving engine failed
│   └── NonFiniteError             NaN or infinity in one request; its neighbours are unaffected
├── SandboxError                   the sandbox service failed
│   ├── MissingCapabilityError     this backend or machine cannot do it; never downgraded silently
│   ├── SandboxDiedError           the sandbox is gone in the middle of an operation
│   └── DeadlineError (TimeoutError)
├── TrainError                     the run cannot go on
│   └── CanaryError                the engine does not use the weights it was given
└── SetupError                     something is missing on this machine; `remedy` says what to install

Messages name the field, the value and the remedy. Third-party errors are converted once, at the boundary, with `from`.
"""

from __future__ import annotations


class TidemillError(Exception):
    """Base class. `remedy` is one sentence a user can act on, or empty."""

    retryable: bool = False

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        if not self.remedy:
            return self.message
        stop = "" if self.message.endswith((".", "!", "?", ":")) else "."
        return f"{self.message}{stop} {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.remedy, self.__dict__.copy()))


def _rebuild(cls: type[TidemillError], message: str, remedy: str, state: dict[str, object]) -> TidemillError:
    error = cls.__new__(cls)
    TidemillError.__init__(error, message, remedy=remedy)
    error.__dict__.update(state)
    return error


class InputError(TidemillError, ValueError):
    """A value from the caller is refused; nothing has been done. `field` names it."""

    def __init__(self, message: str, *, field: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.field = field


class ConfigError(InputError):
    """A configuration key or value is unknown, malformed or contradictory."""


class CapacityError(InputError):
    """The request can never be served with the sizes chosen at start."""


class BusyError(TidemillError):
    """The object is in a state that does not allow this now; trying again later may work."""

    retryable = True


class NotFoundError(TidemillError, KeyError):
    """No object with this id or name."""

    def __str__(self) -> str:
        return TidemillError.__str__(self)


class IntegrityError(TidemillError):
    """Bytes differ from what their digest, name, dtype or shape promised."""


class ManifestError(IntegrityError):
    """A manifest, adapter or checkpoint is incomplete, empty or contradicts itself."""


class StaleVersionError(IntegrityError):
    """The version offered is not newer than the version served."""


class EngineError(TidemillError):
    """The serving engine failed; the message says which request or step."""


class NonFiniteError(EngineError):
    """A logit or state of one request is NaN or infinite. Only that request ends."""


class SandboxError(TidemillError):
    """The sandbox service or its runtime failed: infrastructure, never the guest program's own exit code."""


class MissingCapabilityError(SandboxError):
    """The backend (or this machine) cannot do what was asked."""


class SandboxDiedError(SandboxError):
    """The sandbox ended while an operation on it was in progress."""


class DeadlineError(SandboxError, TimeoutError):
    """An operation on the service itself (not a guest command) passed its deadline."""

    retryable = True


class TrainError(TidemillError):
    """A training run cannot go on; what was written before stays valid."""


class CanaryError(TrainError):
    """Fixed-token log-probs of engine and trainer have come apart: the engine does not serve what was synced."""


class SetupError(TidemillError):
    """Something this machine lacks. `remedy` names the package or command that supplies it."""
