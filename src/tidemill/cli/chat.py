"""`tidemill chat`: a conversation with a local model or any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import httpx
import typer

from tidemill.cli.model_source import model_folder
from tidemill.core.engine_api import GenerateRequest, SamplingParams
from tidemill.core.errors import EngineError, InputError, TidemillError
from tidemill.core.ids import new_id

Piece = tuple[str, str]
"""(`content` or `reasoning`, text)."""
_CONTEXT = 4096


class Partner(Protocol):
    """Answers a conversation, piece by piece."""

    def answer(self, messages: list[dict[str, Any]]) -> AsyncGenerator[Piece]: ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to sample. `max_tokens` None: to the end of the context."""

    max_tokens: int | None
    temperature: float
    seed: int | None
    effort: str | None


class RemotePartner:
    """An OpenAI-compatible server; `model` empty takes the first it lists."""

    def __init__(self, url: str, model: str, options: Options) -> None:
        self._url, self._model, self._options = url.rstrip("/").removesuffix("/v1"), model, options

    async def answer(self, messages: list[dict[str, Any]]) -> AsyncGenerator[Piece]:
        """Raises EngineError if the server cannot be reached or refuses."""
        try:
            async with httpx.AsyncClient(base_url=self._url, timeout=httpx.Timeout(600, connect=10)) as client:
                model = self._model or (await self._get(client, "/v1/models"))["data"][0]["id"]
                options = {"temperature": self._options.temperature, "seed": self._options.seed,
                           "max_completion_tokens": self._options.max_tokens,
                           "reasoning_effort": self._options.effort}
                body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
                body |= {key: value for key, value in options.items() if value is not None}
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code != 200:
                        raise EngineError(_complaint(await response.aread(), response.status_code))
                    async for line in response.aiter_lines():
                        for piece in _pieces(line):
                            yield piece
        except httpx.HTTPError as e:
            raise EngineError(f"cannot talk to {self._url}: {e or type(e).__name__}") from e

    @staticmethod
    async def _get(client: httpx.AsyncClient, path: str) -> Any:
        response = await client.get(path)
        if response.status_code != 200:
            raise EngineError(_complaint(response.content, response.status_code))
        return response.json()


class LocalPartner:
    """A model in this process."""

    def __init__(self, engine: Any, tokenizer: Any, options: Options) -> None:
        from tidemill.model.chat import ChatCodec

        self._engine, self._codec, self._options = engine, ChatCodec(tokenizer), options

    async def answer(self, messages: list[dict[str, Any]]) -> AsyncGenerator[Piece]:
        from tidemill.engine.choice import Choice
        from tidemill.model.chat import ChatOptions, parse_messages, resolve_effort

        thinking, effort = resolve_effort(self._options.effort)
        ids = self._codec.prompt_ids(parse_messages(messages), ChatOptions(thinking=thinking, effort=effort))
        limit = self._options.max_tokens
        params = SamplingParams(
            max_tokens=_CONTEXT if limit is None else limit, temperature=self._options.temperature,
            seed=self._options.seed or 0, stop_token_ids=self._codec.stop_ids)
        request = GenerateRequest(request_id=new_id("chat"), ids=tuple(ids), sampling=params)
        choice = Choice(self._engine, request, self._codec.parser(thinking=thinking), (), with_calls=True)
        async with aclosing(choice.deltas()) as deltas:
            async for delta in deltas:
                if delta.reasoning:
                    yield "reasoning", delta.reasoning
                if delta.content:
                    yield "content", delta.content
                for call in delta.calls:
                    yield "content", f"\n[calls {call.name}({call.arguments_json})]\n"


def chat(
    model: Annotated[str, typer.Argument(help="Folder of a model, or a preset with --random-init.")] = "",
    url: Annotated[str, typer.Option(help="Talk to this server instead, e.g. http://127.0.0.1:8000.")] = "",
    once: Annotated[str | None, typer.Option(help="Send this one message, print the answer and end.")] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    served_model: Annotated[str, typer.Option("--model", help="Model to ask for at --url.")] = "",
    adapter: Annotated[Path | None, typer.Option(help="Adapter folder for a local model.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    effort: Annotated[str | None, typer.Option(help="none, low, high or max.")] = None,
    random_init: Annotated[bool, typer.Option("--random-init", help="A preset with random weights.")] = False,
) -> None:
    """Talk to a model. Answers go to stdout, reasoning to stderr. /reset starts anew, /exit or Ctrl-D ends."""
    if bool(model) == bool(url):
        raise InputError("expected either a model or --url", field="model",
                         remedy="For example: tidemill chat toy --random-init, or tidemill chat --url "
                         "http://127.0.0.1:8000.")
    options = Options(max_tokens=max_tokens, temperature=temperature, seed=seed, effort=effort)
    if url:
        if adapter or random_init:
            raise InputError("--adapter and --random-init are for local models", field="url")
        _converse(RemotePartner(url, served_model, options), once, system)
        return
    from tidemill.engine import EmbeddedEngine, EngineConfig, EngineSpec, load_core
    from tidemill.model.chat import load_tokenizer

    with model_folder(model, random_init=random_init) as folder:
        spec = EngineSpec(model=folder, adapter=adapter, config=EngineConfig(max_model_len=_CONTEXT, max_running=1))
        tokenizer = load_tokenizer(folder)
        engine = EmbeddedEngine(lambda: load_core(spec))
        try:
            _converse(LocalPartner(engine, tokenizer, options), once, system)
        finally:
            engine.shutdown()


def _converse(partner: Partner, once: str | None, system: str) -> None:
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if once is not None:
        asyncio.run(_turn(partner, messages, once))
        return
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(start)
        elif text.strip():
            before = len(messages)
            try:
                asyncio.run(_turn(partner, messages, text))
            except KeyboardInterrupt:  # ends this answer; the next one at the prompt ends the conversation
                print("\n(interrupted)", file=sys.stderr)
                del messages[before:]
            except TidemillError as e:
                print(f"error: {e}", file=sys.stderr)
                del messages[before:]


async def _turn(partner: Partner, messages: list[dict[str, Any]], text: str) -> None:
    """One exchange, appended to `messages`; pieces are shown as they come."""
    messages.append({"role": "user", "content": text})
    said: dict[str, str] = {"content": "", "reasoning": ""}
    async with aclosing(partner.answer(messages)) as pieces:
        async for kind, piece in pieces:
            said[kind] += piece
            print(piece, end="", flush=True, file=sys.stdout if kind == "content" else sys.stderr)
    print(flush=True)
    messages.append({"role": "assistant", "content": said["content"], "reasoning_content": said["reasoning"]})


def _pieces(line: str) -> list[Piece]:
    """Pieces in one line of a server-sent event stream. Raises EngineError if the server reports one."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return []
    data = json.loads(line[6:])
    if "error" in data:
        raise EngineError(str(data["error"].get("message")))
    out: list[Piece] = []
    for choice in data.get("choices", []):
        delta = choice.get("delta", {})
        for kind, text in (("reasoning", delta.get("reasoning_content") or delta.get("reasoning")),
                           ("content", delta.get("content"))):
            if text:
                out.append((kind, text))
    return out


def _complaint(raw: bytes, status: int) -> str:
    try:
        return f"{json.loads(raw)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered HTTP {status}"
