"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tidemill.core.engine_api import GenerateRequest, TokenEvent
from tidemill.core.errors import InputError
from tidemill.core.ids import new_id
from tidemill.engine.choice import Choice, Delta
from tidemill.engine.server.context import ServerContext, new_seed, read_json
from tidemill.engine.server.respond import Chunk, event_stream, gather_choices, merge, while_connected
from tidemill.engine.server.schema import ChatRequest, parse_body, refuse_unsupported_chat
from tidemill.engine.text import parse_stops
from tidemill.model.chat import (
    ChatOptions,
    ParsedCall,
    StreamParser,
    Tokenizer,
    parse_messages,
    parse_tools,
    resolve_effort,
)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A chat request ready to run."""

    body: ChatRequest
    response_id: str
    prompt_ids: list[int]
    choices: list[Choice]
    parsers: list[StreamParser]


async def chat_completions(request: Request, context: ServerContext) -> Response:
    """Handle one request. Raises TidemillError for anything that is refused."""
    body = parse_body(ChatRequest, await read_json(request, context.limits))
    turn = _prepare(body, context)
    if body.stream:
        return await event_stream(request, context, _chunks(turn, context))
    deltas = await while_connected(request, gather_choices(turn.choices, context))
    return JSONResponse(_response(turn, deltas, context))


def chat_options(tools: Sequence[dict[str, Any]] | None, effort: str | None, *, tool_choice: str = "auto",
                 generation_prefix: bool = True) -> ChatOptions:
    """Codec options of a request. Raises InputError."""
    thinking, level = resolve_effort(effort)
    return ChatOptions(thinking=thinking, effort=level, tools=parse_tools(tools), tool_choice=tool_choice,
                       generation_prefix=generation_prefix)


def _prepare(body: ChatRequest, context: ServerContext) -> _Turn:
    context.check_model(body.model)
    refuse_unsupported_chat(body)
    if body.top_logprobs and not body.logprobs:
        raise InputError("top_logprobs needs logprobs = true", field="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None \
            and body.max_tokens != body.max_completion_tokens:
        raise InputError("max_tokens and max_completion_tokens differ", field="max_tokens", remedy="Send one of them.")
    count = body.n or 1
    if count > context.limits.max_choices:
        raise InputError(f"n = {count}: expected at most {context.limits.max_choices}", field="n")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    choice_kind = body.tool_choice if isinstance(body.tool_choice, str) else "auto"
    options = chat_options(body.tools, body.reasoning_effort, tool_choice=choice_kind if body.tools else "auto")
    prompt = context.codec.prompt_ids(parse_messages(body.messages), options)
    context.check_prompt(prompt, limit, field="messages")
    stops = parse_stops(body.stop)
    response_id, seed = new_id("chatcmpl"), new_seed(body)
    choices: list[Choice] = []
    parsers: list[StreamParser] = []
    for index in range(count):
        params = context.sampling(body, prompt_len=len(prompt), max_tokens=limit, stop_ids=context.codec.stop_ids,
                                  top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0, seed=seed,
                                  sequence=index)
        parser = context.codec.parser(thinking=options.thinking)
        parsers.append(parser)
        choices.append(Choice(
            context.engine, GenerateRequest(request_id=f"{response_id}-{index}", ids=tuple(prompt), sampling=params),
            parser, stops, with_calls=choice_kind != "none"))
    return _Turn(body, response_id, prompt, choices, parsers)


def _response(turn: _Turn, deltas: list[Delta], context: ServerContext) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for index, (choice, delta) in enumerate(zip(turn.choices, deltas, strict=True)):
        message: dict[str, Any] = {"role": "assistant", "content": delta.content or None if delta.calls
                                   else delta.content}
        if delta.reasoning:
            message |= _reasoning(delta.reasoning)
        if delta.calls:
            message["tool_calls"] = [_call(call, f"{turn.response_id}-{index}", i)
                                     for i, call in enumerate(delta.calls)]
        row: dict[str, Any] = {"index": index, "message": message, "finish_reason": choice.finish_reason,
                               "logprobs": _logprobs(delta.tokens, context.tokenizer) if turn.body.logprobs else None}
        row |= _matched(choice)
        if turn.body.return_token_ids:
            row["token_ids"] = [t.token_id for t in delta.tokens]
        rows.append(row)
    body = _head(turn, context, "chat.completion") | {"choices": rows, "usage": _usage(turn, context)}
    if turn.body.return_token_ids:
        body["prompt_token_ids"] = turn.prompt_ids
    return body


async def _chunks(turn: _Turn, context: ServerContext) -> AsyncGenerator[Chunk]:
    head = _head(turn, context, "chat.completion.chunk")
    with_usage = bool(turn.body.stream_options and turn.body.stream_options.include_usage)
    if with_usage:
        head["usage"] = None
    started: set[int] = set()
    calls = [0] * len(turn.choices)
    async for index, delta in merge(turn.choices, context):
        part: dict[str, Any] = {}
        if index not in started:
            started.add(index)
            part = {"role": "assistant", "content": ""}
        if delta is None:
            if part:
                yield head | {"choices": [{"index": index, "delta": part, "finish_reason": None, "logprobs": None}]}
            choice = turn.choices[index]
            yield head | {"choices": [{"index": index, "delta": {}, "finish_reason": choice.finish_reason,
                                       "logprobs": None} | _matched(choice)]}
            continue
        if delta.content:
            part["content"] = delta.content
        if delta.reasoning:
            part |= _reasoning(delta.reasoning)
        if delta.calls:
            part["tool_calls"] = [
                {"index": calls[index] + i} | _call(call, f"{turn.response_id}-{index}", calls[index] + i)
                for i, call in enumerate(delta.calls)]
            calls[index] += len(delta.calls)
        row: dict[str, Any] = {
            "index": index, "delta": part, "finish_reason": None,
            "logprobs": _logprobs(delta.tokens, context.tokenizer) if turn.body.logprobs and delta.tokens else None}
        if turn.body.return_token_ids:
            row["token_ids"] = [t.token_id for t in delta.tokens]
        if part or row["logprobs"] or turn.body.return_token_ids:
            yield head | {"choices": [row]}
    usage = _usage(turn, context)
    if with_usage:
        yield head | {"choices": [], "usage": usage}


def _head(turn: _Turn, context: ServerContext, kind: str) -> dict[str, Any]:
    return {"id": turn.response_id, "object": kind, "created": context.now(), "model": turn.body.model,
            "system_fingerprint": context.fingerprint}


def _reasoning(text: str) -> dict[str, str]:
    """Under both names in use."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ParsedCall, owner: str, index: int) -> dict[str, Any]:
    return {"id": f"call-{owner}-{index}", "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_json}}


def _matched(choice: Choice) -> dict[str, str]:
    return {"matched_stop": choice.matched_stop} if choice.matched_stop else {}


def _usage(turn: _Turn, context: ServerContext) -> dict[str, Any]:
    sampled = sum(c.completion_tokens for c in turn.choices)
    cached = sum(c.result.cached_tokens for c in turn.choices if c.result)
    reasoning = sum(p.message.reasoning_tokens for p in turn.parsers)
    context.metrics.prompt_tokens.inc(len(turn.prompt_ids))
    context.metrics.completion_tokens.inc(sampled)
    context.metrics.malformed_calls.inc(sum(c.num_malformed for c in turn.choices))
    return {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": sampled,
            "total_tokens": len(turn.prompt_ids) + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning}}


def _logprobs(tokens: Sequence[TokenEvent], tokenizer: Tokenizer) -> dict[str, Any]:
    """OpenAI's form, for every sampled token shown, markers included; raw model log-probs."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        text = tokenizer.token_name(token_id) or data.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    return {"content": [entry(t.token_id, t.model_logprob) | {"top_logprobs": [entry(*alt) for alt in t.top]}
                        for t in tokens], "refusal": None}


