"""Errors as OpenAI clients expect them: `{"error": {message, type, code, param}}` and a status they can act on."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from tidemill.core.errors import BusyError, CapacityError, EngineError, InputError, NotFoundError, TidemillError

RETRY_AFTER_S = "1"


class HttpError(TidemillError):
    """An error that belongs to HTTP alone."""

    def __init__(self, message: str, *, status: int, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def error_body(error: TidemillError) -> tuple[int, dict[str, Any]]:
    """(status, body) of an error."""
    status, kind, code, param = _classify(error)
    return status, {"error": {"message": str(error), "type": kind, "code": code, "param": param}}


def error_response(error: TidemillError) -> JSONResponse:
    status, body = error_body(error)
    headers = {"retry-after": RETRY_AFTER_S} if status in (429, 503) else None
    return JSONResponse(body, status, headers=headers)


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette exception handler for TidemillError."""
    assert isinstance(error, TidemillError)
    return error_response(error)


def _classify(error: TidemillError) -> tuple[int, str, str, str | None]:
    if isinstance(error, HttpError):
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        return error.status, kind, error.code, error.param
    if isinstance(error, InputError):
        code = "context_length_exceeded" if isinstance(error, CapacityError) else "invalid_value"
        return 400, "invalid_request_error", code, error.field or None
    if isinstance(error, NotFoundError):
        return 404, "invalid_request_error", "not_found", None
    if isinstance(error, BusyError):
        return 429, "rate_limit_error", "busy", None
    if isinstance(error, EngineError):
        return 503, "server_error", "engine_failed", None
    return 500, "server_error", "internal_error", None
