"""The Starlette application: routes, error handling, counting. It owns neither the engine nor the socket."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.core.engine_api import EngineClient, EngineInfo
from tidemill.core.errors import BusyError, EngineError, InputError, TidemillError
from tidemill.engine.server.chat import chat_completions, chat_options
from tidemill.engine.server.completions import completions
from tidemill.engine.server.context import ServerContext, ServerLimits, read_json
from tidemill.engine.server.errors import HttpError, error_response
from tidemill.engine.server.schema import DetokenizeRequest, TokenizeRequest, parse_body
from tidemill.model.chat import ChatCodec, Tokenizer, check_tokenizer, parse_messages

__all__ = ["ServerLimits", "create_app"]

Endpoint = Callable[[Request, ServerContext], Awaitable[Response]]


def create_app(engine: EngineClient, tokenizer: Tokenizer, *, info: EngineInfo, models: Sequence[str],
               codec: ChatCodec | None = None, limits: ServerLimits | None = None) -> Starlette:
    """The application for one engine. `models` are the names a request may use (`base` or `base:adapter`).

    Raises ConfigError if tokenizer and model do not fit.
    """
    check_tokenizer(tokenizer, vocab_size=info.vocab_size, source=info.model)
    context = ServerContext(engine=engine, tokenizer=tokenizer, codec=codec or ChatCodec(tokenizer), info=info,
                            models=tuple(models), limits=limits or ServerLimits())
    routes: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/chat/completions", chat_completions), ("POST", "/v1/completions", completions),
        ("GET", "/v1/models", _models), ("GET", "/v1/models/{model:path}", _model), ("GET", "/health", _health),
        ("GET", "/ready", _ready), ("GET", "/metrics", _metrics), ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
    ]
    return Starlette(
        routes=[Route(path, _bind(endpoint, context), methods=[method]) for method, path, endpoint in routes],
        middleware=[Middleware(_Counting, context=context)], exception_handlers={HTTPException: _http_exception},
    )


def _bind(endpoint: Endpoint, context: ServerContext) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            return await endpoint(request, context)
        except BusyError as e:
            if (await context.engine.info()).asleep:
                return error_response(HttpError(str(e), status=503, code="asleep"))
            return error_response(e)
        except TidemillError as e:
            return error_response(e)

    return handle


async def _models(request: Request, context: ServerContext) -> Response:
    return JSONResponse({"object": "list", "data": [_model_card(name, context) for name in context.models]})


async def _model(request: Request, context: ServerContext) -> Response:
    name = request.path_params["model"]
    context.check_model(name)
    return JSONResponse(_model_card(name, context))


def _model_card(name: str, context: ServerContext) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": context.started, "owned_by": "tidemill",
            "max_model_len": context.info.max_model_len, "base_digest": context.info.base_digest}


async def _health(request: Request, context: ServerContext) -> Response:
    """Liveness: this process answers and its engine has not died. A dead engine needs a restart."""
    try:
        await context.engine.info()
    except EngineError as e:
        return error_response(HttpError(str(e), status=503, code="engine_dead"))
    return JSONResponse({"status": "ok"})


async def _ready(request: Request, context: ServerContext) -> Response:
    """Readiness: a request sent now would be taken."""
    info = await context.engine.info()
    if info.asleep:
        raise HttpError(f"the engine sleeps ({', '.join(info.asleep)})", status=503, code="asleep")
    return JSONResponse({"status": "ready", "version": info.version, "running": int(info.stats.get("running", 0)),
                         "waiting": int(info.stats.get("waiting", 0))})


async def _metrics(request: Request, context: ServerContext) -> Response:
    return Response(context.metrics.render(await context.engine.info()),
                    media_type="text/plain; version=0.0.4; charset=utf-8")


async def _tokenize(request: Request, context: ServerContext) -> Response:
    body = parse_body(TokenizeRequest, await read_json(request, context.limits))
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InputError("expected exactly one of prompt and messages", field="prompt")
    if body.prompt is not None:
        ids = list(context.tokenizer.encode_text(body.prompt))
    else:
        options = chat_options(body.tools, body.reasoning_effort, generation_prefix=body.add_generation_prompt)
        ids = context.codec.prompt_ids(parse_messages(body.messages or []), options)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": context.info.max_model_len})


async def _detokenize(request: Request, context: ServerContext) -> Response:
    body = parse_body(DetokenizeRequest, await read_json(request, context.limits))
    context.check_model(body.model)
    bad = next((i for i in body.tokens if not 0 <= i < context.tokenizer.size), None)
    if bad is not None:
        raise InputError(f"tokens holds {bad}: expected 0 to {context.tokenizer.size - 1}", field="tokens")
    return JSONResponse({"prompt": context.tokenizer.decode(body.tokens)})


async def _http_exception(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own 404 and 405 in OpenAI's form."""
    assert isinstance(error, HTTPException)
    return error_response(HttpError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code,
                                    code="not_found" if error.status_code == 404 else "method_not_allowed"))


class _Counting:
    """ASGI middleware that counts and times requests by route."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app, self._metrics = app, context.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), "aborted"

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            route = scope.get("route")
            path = route.path if isinstance(route, Route) else "other"
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(time.monotonic() - started)
