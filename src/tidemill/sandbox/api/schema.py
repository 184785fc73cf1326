"""Bodies and queries of the API as checked values. Unknown fields are refused by name; every number has a range.

Names follow E2B's control plane where it has one (templateID, timeout, metadata, count); the rest are ours.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tidemill.core.errors import InputError

MAX_TIMEOUT_S = 30 * 24 * 3600.0
MAX_EXEC_TIMEOUT_S = 24 * 3600.0
MAX_OUTPUT_BYTES = 64 << 20
MAX_BATCH = 512
MAX_FORK = 100
MAX_JSON_BYTES = 32 << 20
"""Largest JSON body (exec carries stdin as base64)."""
MAX_FILE_BYTES = 256 << 20

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def _no_nul(text: str) -> str:
    if "\x00" in text:
        raise ValueError("must not contain a NUL character")
    return text


def _limited_metadata(metadata: dict[str, str]) -> dict[str, str]:
    size = sum(len(k.encode()) + len(v.encode()) for k, v in metadata.items())
    if len(metadata) > 64 or size > 8192:
        raise ValueError(f"at most 64 entries and 8192 bytes, got {len(metadata)} and {size}")
    return metadata


def _limited_env(env: dict[str, str]) -> dict[str, str]:
    size = sum(len(k) + len(v) for k, v in env.items())
    if len(env) > 256 or size > 65_536:
        raise ValueError(f"at most 256 variables and 65536 characters, got {len(env)} and {size}")
    if bad := next((k for k in env if not k or "=" in k), None):
        raise ValueError(f"{bad!r} is not a variable name")
    return env


Text = Annotated[str, AfterValidator(_no_nul)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=128)]
OptionalName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._:/-]*)?$", max_length=128)]
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]
ExecSeconds = Annotated[float, Field(gt=0, le=MAX_EXEC_TIMEOUT_S, allow_inf_nan=False)]
OutputBytes = Annotated[int, Field(ge=0, le=MAX_OUTPUT_BYTES)]
Metadata = Annotated[dict[Text, Text], AfterValidator(_limited_metadata)]


class Body(BaseModel):
    """Base of all bodies: strict types, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=False)


class CreateBody(Body):
    """POST /sandboxes (timeout 15 s when left out, as E2B's first API) and /v2/sandboxes (300 s)."""

    template: Name = Field("base", alias="templateID")
    timeout: Seconds | None = None
    metadata: Metadata = {}
    backend: OptionalName = ""
    lease: OptionalName = ""


class BatchBody(CreateBody):
    """POST /x/v1/sandboxes/batch: `count` sandboxes at once; answers one entry per sandbox."""

    count: int = Field(ge=1, le=MAX_BATCH)


class ForkBody(Body):
    """POST /sandboxes/{id}/fork."""

    count: int = Field(1, ge=1, le=MAX_FORK)
    timeout: Seconds | None = None


class TimeoutBody(Body):
    """POST /sandboxes/{id}/timeout: ends `timeout` seconds from now."""

    timeout: Seconds


class ResumeBody(Body):
    """POST /sandboxes/{id}/resume."""

    timeout: Seconds | None = None


class EmptyBody(Body):
    """An operation without parameters: no body, or {}."""


class ExecBody(Body):
    """POST /x/v1/sandboxes/{id}/exec. `stdin` is base64."""

    argv: list[Text] = Field(min_length=1, max_length=4096)
    stdin: str = ""
    env: Annotated[dict[Text, Text], AfterValidator(_limited_env)] = {}
    cwd: Text = Field("", max_length=4096)
    user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")] = "user"
    timeout: ExecSeconds = 30.0
    max_output_bytes: OutputBytes = Field(1 << 20, alias="maxOutputBytes")


class OpenSessionBody(Body):
    """POST /x/v1/sandboxes/{id}/sessions."""

    kind: Annotated[str, Field(pattern=r"^(sh|python)$")] = "sh"


class RunBody(Body):
    """POST /x/v1/sandboxes/{id}/sessions/{session}/run."""

    code: str
    timeout: ExecSeconds = 10.0
    max_output_bytes: OutputBytes = Field(65_536, alias="maxOutputBytes")


class LeaseBody(Body):
    """POST /x/v1/leases: by owner process, by heartbeat within `ttl`, or both."""

    lease: Name
    owner_pid: int | None = Field(None, alias="ownerPid", ge=1, le=1 << 31)
    owner_start: int | None = Field(None, alias="ownerStart", ge=0, le=1 << 62)
    ttl: Seconds | None = None


T = TypeVar("T", bound=Body)


def parse_body(cls: type[T], raw: bytes) -> T:
    """The checked body; an empty one counts as {}. Raises InputError naming each wrong field."""
    try:
        return cls.model_validate_json(raw or b"{}")
    except ValidationError as e:
        lines: list[str] = []
        first = ""
        for item in e.errors(include_url=False, include_context=False):
            loc = ".".join(str(p) for p in item["loc"])
            first = first or loc
            if item["type"] == "json_invalid":
                raise InputError(f"the body is not valid JSON: {item['msg']}.", field="body") from e
            if item["type"] == "extra_forbidden":
                known = ", ".join(sorted(f.alias or n for n, f in cls.model_fields.items())) or "none"
                lines.append(f"{loc}: unknown field (known: {known})")
            elif item["type"] == "missing":
                lines.append(f"{loc}: required")
            else:
                lines.append(f"{loc or 'body'} = {_short(item.get('input'))}: {item['msg']}")
        raise InputError("; ".join(lines) + ".", field=first) from e


def decode_base64(field: str, text: str) -> bytes:
    """Bytes of a base64 field. Raises InputError naming it."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise InputError(f"{field} = {_short(text)}: not valid base64.", field=field) from e


def check_query(query: Mapping[str, str], allowed: Iterable[str]) -> None:
    """Raise InputError naming a query parameter this endpoint does not have."""
    known = sorted(allowed)
    for name in query:
        if name not in known:
            raise InputError(f"{name}: unknown query parameter (known: {', '.join(known) or 'none'}).", field=name)


def query_int(query: Mapping[str, str], name: str, *, default: int, low: int, high: int, base: int = 10) -> int:
    """A whole number from the query within [low, high]."""
    text = query.get(name)
    if text is None:
        return default
    try:
        value = int(text, base)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise InputError(f"{name} = {_short(text)}: expected a whole number from {low} to {high}.", field=name)
    return value


def query_float(query: Mapping[str, str], name: str, *, default: float, low: float, high: float) -> float:
    """A finite number from the query within [low, high]."""
    text = query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise InputError(f"{name} = {_short(text)}: expected a number from {low:g} to {high:g}.", field=name)
    return value


def query_path(query: Mapping[str, str]) -> str:
    """The required absolute `path` of a file call."""
    path = query.get("path", "")
    if not path.startswith("/") or "\x00" in path or len(path.encode("utf-8", "replace")) > 4096:
        raise InputError(f"path = {_short(path)}: expected an absolute path of at most 4096 bytes.", field="path")
    try:
        path.encode()
    except UnicodeEncodeError as e:
        raise InputError(f"path = {_short(path)}: not valid UTF-8.", field="path") from e
    return path


def valid_id(text: str) -> bool:
    """Whether text could be an id at all; others need no look-up."""
    return _ID.fullmatch(text) is not None


def to_json(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
