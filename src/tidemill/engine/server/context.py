"""What every endpoint needs, in one place, and the steps they share: model name, limits, sampling parameters."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from tidemill.core.config import require
from tidemill.core.digests import digest_bytes
from tidemill.core.engine_api import EngineClient, EngineInfo, SamplingParams
from tidemill.core.errors import InputError
from tidemill.engine.server.errors import HttpError
from tidemill.engine.server.metrics import Metrics
from tidemill.engine.server.schema import SamplingFields
from tidemill.model.chat import ChatCodec, Tokenizer


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a client may ask for at once."""

    max_body_bytes: int = 16 << 20
    max_choices: int = 64
    """Prompts times n of one request."""
    keep_alive_s: int = 15
    """Silence on a stream after which a comment is sent, so that proxies keep it open."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_choices", "keep_alive_s"):
            require(getattr(self, name) >= 1, field=name, value=getattr(self, name), expected="an integer >= 1")


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """One served model. `models` are the ids a request may name; the first is reported in answers."""

    engine: EngineClient
    tokenizer: Tokenizer
    codec: ChatCodec
    models: tuple[str, ...]
    info: EngineInfo
    """As of start; only what cannot change is used."""
    limits: ServerLimits
    metrics: Metrics = field(default_factory=Metrics)
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def fingerprint(self) -> str:
        """Changes when answers to a seeded request may: another base or arithmetic."""
        return f"{self.info.base_digest[-12:]}-{digest_bytes(self.info.numerics.encode())[-8:]}"

    def now(self) -> int:
        """Unix time of a response."""
        return int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raise a 404 unless this server has that model."""
        if name is not None and name not in self.models:
            raise HttpError(f"the model {name!r} does not exist; this server has {', '.join(self.models)}",
                            status=404, code="model_not_found", param="model")

    def check_prompt(self, ids: Sequence[int], max_tokens: int | None, *, field: str) -> None:
        """Raise a 400 with the numbers if a prompt does not fit the context."""
        limit = self.info.max_model_len
        room = 0 if max_tokens == 0 else 1
        if len(ids) + room > limit:
            raise HttpError(
                f"the prompt has {len(ids)} tokens, but the context is {limit} tokens"
                + (" and at least one must be generated" if room else "") + "; shorten the prompt",
                status=400, code="context_length_exceeded", param=field)

    def sampling(self, body: SamplingFields, *, prompt_len: int, max_tokens: int | None, stop_ids: Sequence[int],
                 top_logprobs: int, seed: int, sequence: int) -> SamplingParams:
        """Engine parameters of one choice. Without a limit of its own it may fill the context."""
        eos = () if body.ignore_eos else tuple(stop_ids)
        room = self.info.max_model_len - prompt_len
        return SamplingParams(
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p, top_k=max(0, body.top_k or 0), min_p=body.min_p or 0.0,
            seed=seed, sequence=sequence, stop_token_ids=(*eos, *(body.stop_token_ids or ())),
            min_tokens=body.min_tokens or 0, top_logprobs=top_logprobs, logit_bias=_logit_bias(body.logit_bias),
            frequency_penalty=body.frequency_penalty or 0.0, presence_penalty=body.presence_penalty or 0.0,
        )


def new_seed(body: SamplingFields) -> int:
    """The request's seed, or a fresh one: then its choices differ from every other request's."""
    return secrets.randbits(64) if body.seed is None else body.seed


async def read_json(request: Request, limits: ServerLimits) -> Any:
    """The decoded body. 413 if it is too large, 400 if it is no JSON."""
    length = request.headers.get("content-length", "")
    too_large = HttpError(f"the request body is larger than {limits.max_body_bytes} bytes", status=413,
                          code="request_too_large")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        raise too_large
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > limits.max_body_bytes:
            raise too_large
    try:
        return json.loads(raw)
    except ValueError as e:
        raise InputError(f"the request body is not valid JSON: {e}") from e


def _logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), amount) for token, amount in (bias or {}).items())
    except ValueError as e:
        raise InputError(f"logit_bias has a key that is no token id: {e}", field="logit_bias") from e
