"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tidemill.core.engine_api import GenerateRequest, TokenEvent
from tidemill.core.errors import InputError
from tidemill.core.ids import new_id
from tidemill.engine.choice import Choice, Delta
from tidemill.engine.server.context import ServerContext, new_seed, read_json
from tidemill.engine.server.respond import Chunk, event_stream, gather_choices, merge, while_connected
from tidemill.engine.server.schema import CompletionRequest, parse_body, refuse_unsupported_completion
from tidemill.engine.text import PlainParser, parse_stops
from tidemill.model.chat import Tokenizer


@dataclass(frozen=True, slots=True)
class _Job:
    """A completion request ready to run: choice i belongs to prompt i // n."""

    body: CompletionRequest
    response_id: str
    prompts: list[list[int]]
    choices: list[Choice]


async def completions(request: Request, context: ServerContext) -> Response:
    """Handle one request. Raises TidemillError for anything that is refused."""
    body = parse_body(CompletionRequest, await read_json(request, context.limits))
    job = _prepare(body, context)
    if body.stream:
        return await event_stream(request, context, _chunks(job, context))
    deltas = await while_connected(request, gather_choices(job.choices, context))
    return JSONResponse(_response(job, deltas, context))


def _prepare(body: CompletionRequest, context: ServerContext) -> _Job:
    context.check_model(body.model)
    refuse_unsupported_completion(body)
    prompts = _prompts(body.prompt, context)
    n = body.n or 1
    if n * len(prompts) > context.limits.max_choices:
        raise InputError(f"n = {n} for {len(prompts)} prompts: expected at most {context.limits.max_choices} choices",
                         field="n")
    limit = 16 if body.max_tokens is None else body.max_tokens  # OpenAI's default for this endpoint
    if limit == 0 and not body.echo:
        raise InputError("max_tokens = 0 without echo asks for nothing", field="max_tokens")
    stops, response_id, seed = parse_stops(body.stop), new_id("cmpl"), new_seed(body)
    choices: list[Choice] = []
    for index in range(n * len(prompts)):
        ids = prompts[index // n]
        context.check_prompt(ids, limit, field="prompt")
        params = context.sampling(body, prompt_len=len(ids), max_tokens=limit, stop_ids=context.codec.stop_ids,
                                  top_logprobs=body.logprobs or 0, seed=seed, sequence=index)
        choices.append(Choice(
            context.engine,
            GenerateRequest(request_id=f"{response_id}-{index}", ids=tuple(ids), sampling=params,
                            prompt_logprobs=bool(body.echo) and body.logprobs is not None),
            PlainParser(context.tokenizer), stops, with_calls=False))
    return _Job(body, response_id, prompts, choices)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]], context: ServerContext) -> list[list[int]]:
    """Ids of each prompt. Raises InputError if there is none, one is empty, or an id is out of range."""
    prompts: list[list[int]] = []
    single = isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))
    items = cast("Sequence[Any]", [prompt] if single else prompt)
    for item in items:
        ids = list(context.tokenizer.encode_text(item)) if isinstance(item, str) else list(item)
        if not ids:
            raise InputError("prompt is empty", field="prompt", remedy="Send at least one token.")
        size = context.info.vocab_size
        bad = next((i for i in ids if not 0 <= i < size), None)
        if bad is not None:
            raise InputError(f"prompt holds token id {bad}: expected 0 to {size - 1}", field="prompt")
        prompts.append(ids)
    if not prompts:
        raise InputError("prompt is an empty list", field="prompt")
    return prompts


def _response(job: _Job, deltas: list[Delta], context: ServerContext) -> dict[str, Any]:
    n = job.body.n or 1
    rows: list[dict[str, Any]] = []
    for index, (choice, delta) in enumerate(zip(job.choices, deltas, strict=True)):
        prompt = job.prompts[index // n]
        text = delta.content
        if job.body.echo:
            text = context.tokenizer.decode(prompt, control=False) + text
        row: dict[str, Any] = {"index": index, "text": text, "finish_reason": choice.finish_reason, "logprobs": None}
        if job.body.logprobs is not None:
            table = _Table(context.tokenizer)
            if job.body.echo and choice.result is not None:
                for token_id, logprob in zip(prompt, choice.result.prompt_logprobs, strict=True):
                    table.add(token_id, logprob, None)
            table.add_tokens(delta.tokens)
            row["logprobs"] = table.rows
        if job.body.return_token_ids:
            row |= {"token_ids": [t.token_id for t in delta.tokens], "prompt_token_ids": prompt}
        rows.append(row)
    return _head(job, context) | {"choices": rows, "usage": _usage(job, context)}


async def _chunks(job: _Job, context: ServerContext) -> AsyncGenerator[Chunk]:
    head = _head(job, context)
    with_usage = bool(job.body.stream_options and job.body.stream_options.include_usage)
    if with_usage:
        head["usage"] = None
    offsets = [0] * len(job.choices)
    async for index, delta in merge(job.choices, context):
        row: dict[str, Any] = {"index": index, "text": "", "finish_reason": None, "logprobs": None}
        if delta is None:
            row["finish_reason"] = job.choices[index].finish_reason
        else:
            row["text"] = delta.content
            if job.body.logprobs is not None and delta.tokens:
                table = _Table(context.tokenizer, offsets[index])
                table.add_tokens(delta.tokens)
                offsets[index] = table.offset
                row["logprobs"] = table.rows
            if job.body.return_token_ids:
                row["token_ids"] = [t.token_id for t in delta.tokens]
        yield head | {"choices": [row]}
    usage = _usage(job, context)
    if with_usage:
        yield head | {"choices": [], "usage": usage}


class _Table:
    """OpenAI's parallel lists of log-probs. Raw model log-probs; alternatives only for sampled tokens."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self.offset = offset
        self.rows: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, token_id: int, logprob: float | None, top: Sequence[tuple[int, float]] | None) -> None:
        text = self._tokenizer.decode([token_id])
        self.rows["tokens"].append(text)
        self.rows["token_logprobs"].append(logprob)
        self.rows["top_logprobs"].append(None if top is None else {self._tokenizer.decode([i]): p for i, p in top})
        self.rows["text_offset"].append(self.offset)
        self.offset += len(self._tokenizer.decode([token_id], control=False))

    def add_tokens(self, tokens: Sequence[TokenEvent]) -> None:
        for token in tokens:
            self.add(token.token_id, token.model_logprob, token.top or None)


def _head(job: _Job, context: ServerContext) -> dict[str, Any]:
    return {"id": job.response_id, "object": "text_completion", "created": context.now(), "model": job.body.model,
            "system_fingerprint": context.fingerprint}


def _usage(job: _Job, context: ServerContext) -> dict[str, Any]:
    prompt = sum(len(p) for p in job.prompts)
    sampled = sum(c.completion_tokens for c in job.choices)
    context.metrics.prompt_tokens.inc(prompt)
    context.metrics.completion_tokens.inc(sampled)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
