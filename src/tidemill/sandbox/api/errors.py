"""Errors to HTTP and back. The body is {code, message, remedy, type} plus `field` where one is to blame.

`type` is the class name in tidemill.core.errors, so a client raises what the service raised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from tidemill.core import errors as core

STATUS: dict[type[core.TidemillError], int] = {
    core.CapacityError: 422,
    core.InputError: 400,
    core.BusyError: 409,
    core.NotFoundError: 404,
    core.MissingCapabilityError: 409,
    core.SandboxDiedError: 410,
    core.DeadlineError: 504,
    core.SetupError: 503,
    core.IntegrityError: 500,
    core.SandboxError: 500,
}
"""By class; the nearest base in the method resolution order counts."""

_TYPES: dict[str, type[core.TidemillError]] = {
    cls.__name__: cls for cls in (
        core.InputError, core.ConfigError, core.CapacityError, core.BusyError, core.NotFoundError, core.IntegrityError,
        core.MissingCapabilityError, core.SandboxDiedError, core.DeadlineError, core.SetupError, core.SandboxError)
}


class BodyTooLargeError(core.InputError):
    """The request body is larger than this endpoint takes (413)."""


class UnauthorizedError(core.InputError):
    """The API key is missing or wrong (401)."""


class MethodError(core.InputError):
    """The path exists, but not for this method (405)."""


STATUS |= {BodyTooLargeError: 413, UnauthorizedError: 401, MethodError: 405}


def status_of(error: core.TidemillError) -> int:
    """HTTP status of an error."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cast("type[core.TidemillError]", cls)]
    return 500


def type_of(error: core.TidemillError) -> str:
    """Name of the core class a client should raise."""
    return next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _TYPES), "SandboxError")


def error_body(error: core.TidemillError, *, status: int | None = None) -> dict[str, Any]:
    """The JSON object for an error."""
    body: dict[str, Any] = {"code": status or status_of(error), "message": error.message, "remedy": error.remedy,
                            "type": type_of(error)}
    field = getattr(error, "field", "")
    if field:
        body["field"] = field
    return body


def error_from_body(body: Mapping[str, Any]) -> core.TidemillError:
    """The error a body describes; unknown types become SandboxError."""
    cls = _TYPES.get(str(body.get("type", "")), core.SandboxError)
    message, remedy = str(body.get("message", "no message")), str(body.get("remedy", ""))
    if issubclass(cls, core.InputError):
        return cls(message, field=str(body.get("field", "")), remedy=remedy)
    return cls(message, remedy=remedy)


def error_from_answer(status: int, raw: bytes) -> core.TidemillError:
    """The error of an HTTP answer, also when its body is not ours."""
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    if isinstance(body, dict):
        return error_from_body(cast("dict[str, Any]", body))
    return core.SandboxError(f"the sandbox service answered {status}: {raw[:200].decode('utf-8', 'replace')!r}")
