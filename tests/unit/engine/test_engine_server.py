"""The HTTP server over a scripted engine: what clients see, to the byte, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.engine_api import Completion, EngineInfo, FinishReason, GenerateRequest, TokenEvent
from tidemill.core.errors import BusyError, EngineError, InputError
from tidemill.engine.server import ServerLimits, create_app
from tidemill.engine.text import PlainParser, StopScanner
from tidemill.model.chat import ChatCodec, build_tokenizer
from tidemill.model.chat.grammar import close_tag, open_tag

TOKENIZER = build_tokenizer(("hello", " world"))
CODEC = ChatCodec(TOKENIZER)
INFO = EngineInfo(model="m", base_digest="sha256:abc", adapter_digest="", version=0, vocab_size=TOKENIZER.size,
                  max_model_len=400, max_running=4, num_pages=1, page_size=64, num_slots=4, numerics="test")


class ScriptedEngine:
    """Streams scripted tokens; `fail` raises before, `break_at` ends with an error after some tokens."""

    def __init__(self, script: Sequence[int], *, endless: bool = False) -> None:
        self.script = list(script)
        self.endless = endless
        self.requests: list[GenerateRequest] = []
        self.closed = 0
        self.fail: Exception | None = None
        self.break_at: int | None = None
        self.asleep: tuple[str, ...] = ()

    async def info(self) -> EngineInfo:
        if isinstance(self.fail, EngineError):
            raise self.fail
        return dataclasses.replace(INFO, asleep=self.asleep, stats={"running": 1.0})

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Completion]:
        self.requests.append(request)
        if self.fail is not None:
            raise self.fail
        ids: list[int] = []
        reason, error = FinishReason.LENGTH, ""
        try:
            while True:
                for token in self.script:
                    if len(ids) == request.sampling.max_tokens:
                        break
                    if self.break_at == len(ids):
                        reason, error = FinishReason.ERROR, "a logit is not finite at position 3"
                        break
                    await asyncio.sleep(0)
                    ids.append(token)
                    yield TokenEvent(
                        request_id=request.request_id, token_id=token, logprob=-0.5, model_logprob=-0.25, version=0,
                        position=len(request.ids) + len(ids) - 1,
                        top=((token, -0.25), (1, -2.0))[: request.sampling.top_logprobs])
                    if token in request.sampling.stop_token_ids:
                        reason = FinishReason.STOP
                        break
                else:
                    if self.endless:
                        continue
                break
            yield Completion(
                request_id=request.request_id, ids=tuple(ids), logprobs=(), model_logprobs=(), versions=(),
                finish_reason=reason, prompt_tokens=len(request.ids), cached_tokens=0, error=error,
                prompt_logprobs=(None, *[-1.0] * (len(request.ids) - 1)) if request.prompt_logprobs else ())
        finally:
            self.closed += 1


def text(value: str) -> list[int]:
    return list(TOKENIZER.encode_text(value))


def tags(*segments: Any) -> list[int]:
    return CODEC.encode([p for segment in segments for p in ([segment] if isinstance(segment, str) else segment)])


END = [TOKENIZER.control.end_of_msg]
ANSWER = [*tags("because", close_tag("think"), open_tag("response"), "hello world é", close_tag("response"),
                close_tag("message")), *END]
CALL = [*tags(close_tag("think"), open_tag("tools"), open_tag("call", [("tool", "python"), ("index", "1")]),
              open_tag("argument", [("key", "code"), ("type", "string")]), "print(1)", close_tag("argument"),
              open_tag("argument", [("key", "n"), ("type", "number")]), "3", close_tag("argument"), close_tag("call"),
              close_tag("tools"), close_tag("message")), *END]
TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def app(engine: ScriptedEngine, **limits: Any):
    return create_app(engine, TOKENIZER, info=INFO, models=("m", "m:v1"), limits=ServerLimits(**limits))  # type: ignore[arg-type]


def post(engine: ScriptedEngine, path: str, body: Any, **limits: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=app(engine, **limits))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            if isinstance(body, bytes):
                return await client.post(path, content=body)
            return await client.post(path, json=body)

    return asyncio.run(main())


def get(engine: ScriptedEngine, path: str) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app(engine)), base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(main())


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A message put together from stream chunks, as a client does it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None,
                               "tokens": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            message["tool_calls"] += [{k: v for k, v in c.items() if k != "index"} for c in delta.get("tool_calls", [])]
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
            if choice["logprobs"]:
                message["tokens"] += choice["logprobs"]["content"]
    return message


def test_chat_splits_reasoning_content_and_usage():
    body = post(ScriptedEngine(ANSWER), "/v1/chat/completions", CHAT).json()
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello world é", "reasoning_content": "because",
                                 "reasoning": "because"}
    assert choice["finish_reason"] == "stop"
    assert body["object"] == "chat.completion"
    assert body["model"] == "m"
    usage = body["usage"]
    assert usage["completion_tokens"] == len(ANSWER)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(text("because"))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("script", [ANSWER, CALL, ANSWER[:7], CALL[:20], text("never closed")], ids=range(5))
@pytest.mark.parametrize("stop", [None, "wor", ["lo wo", "zzz"]])
def test_stream_and_whole_answer_are_equal(script, stop):
    options = CHAT | {"tools": TOOLS, "logprobs": True, "top_logprobs": 2, "stop": stop, "n": 2, "max_tokens": 300}
    whole = post(ScriptedEngine(script), "/v1/chat/completions", options).json()
    chunks = events(post(ScriptedEngine(script), "/v1/chat/completions",
                         options | {"stream": True, "stream_options": {"include_usage": True}}))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in chunks[:-1])
    for choice in whole["choices"]:
        message, got = choice["message"], joined(chunks, choice["index"])
        assert got["content"] == (message["content"] or "")
        assert got["reasoning_content"] == message.get("reasoning_content", "")
        assert got["finish_reason"] == choice["finish_reason"]
        assert got["tokens"] == choice["logprobs"]["content"]
        assert [c["function"] for c in got["tool_calls"]] == [c["function"] for c in message.get("tool_calls", [])]


def test_tool_calls():
    engine = ScriptedEngine(CALL)
    body = post(engine, "/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": "auto"}).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "python"
    assert json.loads(call["function"]["arguments"]) == {"code": "print(1)", "n": 3}
    none = post(ScriptedEngine(CALL), "/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": "none"}).json()
    assert "tool_calls" not in none["choices"][0]["message"]
    assert none["choices"][0]["finish_reason"] == "stop"
    # The declared tools are in the prompt.
    plain = ScriptedEngine(CALL)
    post(plain, "/v1/chat/completions", CHAT)
    assert len(engine.requests[0].ids) > len(plain.requests[0].ids)


@given(st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
       st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3))
def test_stop_scanner_shows_what_a_search_of_the_whole_text_says(pieces, stops):
    scanner = StopScanner(stops)
    shown = ""
    for piece in pieces:
        shown += scanner.push(piece)
        if scanner.matched:
            break
    whole = "".join(pieces)
    cuts = [at for s in stops if (at := whole.find(s)) >= 0]
    if scanner.matched:
        # A longer stop may begin earlier but end later: the first to be complete wins.
        assert scanner.matched in stops
        assert whole.startswith(shown + scanner.matched)
        assert not any(s in shown for s in stops)
    else:
        assert not cuts
        assert shown + scanner.flush() == whole


def test_stop_strings_span_tokens_and_abort_the_engine():
    engine = ScriptedEngine([*tags(close_tag("think"), open_tag("response")), *text("abcdefgh")], endless=True)
    body = post(engine, "/v1/chat/completions", CHAT | {"stop": ["def"], "logprobs": True}).json()
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["matched_stop"]) == ("abc", "stop", "def")
    shown = [t["token"] for t in choice["logprobs"]["content"]]
    assert shown[-3:] == ["a", "b", "c"]
    assert engine.closed == 1


def test_a_character_split_over_tokens_is_held_back():
    bytes_of = text("é")
    assert len(bytes_of) == 2
    parser = PlainParser(TOKENIZER)
    assert parser.push(bytes_of[:1]) == []
    assert [d.text for d in parser.push(bytes_of[1:])] == ["é"]
    parser.push(bytes_of[:1])
    assert [d.text for d in parser.finish()] == ["\ufffd"]


def test_sampling_parameters_reach_the_engine():
    engine = ScriptedEngine(ANSWER)
    post(engine, "/v1/chat/completions", CHAT | {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "n": 2, "max_completion_tokens": 9,
        "logit_bias": {"5": -1.5}, "frequency_penalty": 0.5, "presence_penalty": -0.5, "min_tokens": 2,
        "stop_token_ids": [9], "logprobs": True, "top_logprobs": 4})
    first, second = (r.sampling for r in engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.min_p, first.seed) == (0.5, 0.9, 7, 0.1, -3)
    assert (first.max_tokens, first.min_tokens, first.top_logprobs) == (9, 2, 4)
    assert first.logit_bias == ((5, -1.5),)
    assert (first.frequency_penalty, first.presence_penalty) == (0.5, -0.5)
    assert first.stop_token_ids == (*CODEC.stop_ids, 9)
    assert (first.sequence, second.sequence, second.seed) == (0, 1, -3)
    defaults = ScriptedEngine(ANSWER)
    post(defaults, "/v1/chat/completions", CHAT | {"ignore_eos": True, "top_k": -1})
    only = defaults.requests[0]
    assert only.sampling.temperature == 1.0
    assert only.sampling.top_k == 0
    assert only.sampling.stop_token_ids == ()
    assert only.sampling.max_tokens == 400 - len(only.ids)


def test_reasoning_effort_none_starts_in_the_response():
    engine = ScriptedEngine([*text("hello"), *tags(close_tag("response"), close_tag("message")), *END])
    body = post(engine, "/v1/chat/completions", CHAT | {"reasoning_effort": "none"}).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(("change", "status", "param", "part"), [
    ({"model": "other"}, 404, "model", "does not exist; this server has m, m:v1"),
    ({"messages": []}, 400, "messages", "at least one message"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", "one of system"),
    ({"messages": "hi"}, 400, "messages", "list"),
    ({"temperature": 3}, 400, "temperature", "less than or equal to 2"),
    ({"temperature": 0.001}, 400, "temperature", ""),
    ({"top_p": 0}, 400, "top_p", "greater than 0"),
    ({"n": 0}, 400, "n", ""),
    ({"n": 100}, 400, "n", "at most 64"),
    ({"temprature": 1}, 400, "temprature", "unknown field"),
    ({"tool_choice": "required"}, 400, "tool_choice", "only 'auto' and 'none'"),
    ({"tool_choice": {"type": "function", "function": {"name": "python"}}}, 400, "tool_choice", "only 'auto'"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "only 'text'"),
    ({"parallel_tool_calls": False}, 400, "parallel_tool_calls", "not supported"),
    ({"functions": []}, 400, "functions", "not supported"),
    ({"modalities": ["audio"]}, 400, "modalities", ""),
    ({"reasoning_effort": "medium"}, 400, "reasoning_effort", "expected none"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "needs logprobs"),
    ({"top_logprobs": 30, "logprobs": True}, 400, "top_logprobs", ""),
    ({"stop": ""}, 400, "stop", "0 characters"),
    ({"stop": ["a"] * 20}, 400, "stop", "at most 16"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", "no token id"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens", "differ"),
    ({"messages": [{"role": "user", "content": "x" * 500}]}, 400, "messages", "but the context is 400 tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type", ""),
    ({"tools": [{"type": "retrieval"}]}, 400, "tools[0].type", ""),
    ({"seed": 1 << 70}, 400, "seed", ""),
])
def test_refusals_name_the_field(change, status, param, part):
    engine = ScriptedEngine(ANSWER)
    if change == {"temperature": 0.001}:
        engine.fail = InputError("temperature = 0.001: expected 0 or 0.01 to 100", field="temperature")
    for stream in (False, True):
        response = post(engine, "/v1/chat/completions", CHAT | change | {"stream": stream})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), error
        assert part in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff", b""])
def test_bodies_that_are_no_json_object(body):
    response = post(ScriptedEngine(ANSWER), "/v1/chat/completions", body)
    assert response.status_code == 400
    assert "request body is" in response.json()["error"]["message"]


def test_fields_that_openai_knows_and_that_change_nothing_are_ignored():
    response = post(ScriptedEngine(ANSWER), "/v1/chat/completions", CHAT | {
        "user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "modalities": ["text"]})
    assert response.status_code == 200


def test_large_bodies_are_413_with_and_without_a_length():
    body = CHAT | {"messages": [{"role": "user", "content": "x" * 5000}]}
    assert post(ScriptedEngine(ANSWER), "/v1/chat/completions", body, max_body_bytes=1000).status_code == 413

    async def chunked() -> int:
        async def parts():
            for _ in range(30):
                yield b" " * 100

        transport = httpx.ASGITransport(app=app(ScriptedEngine(ANSWER), max_body_bytes=1000))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.post("/v1/completions", content=parts())).status_code

    assert asyncio.run(chunked()) == 413


def test_busy_asleep_and_dead_engines():
    engine = ScriptedEngine(ANSWER)
    engine.fail = BusyError("4096 requests are waiting")
    response = post(engine, "/v1/chat/completions", CHAT)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    engine.asleep = ("pools",)
    response = post(engine, "/v1/chat/completions", CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "asleep")
    assert get(engine, "/ready").status_code == 503
    assert get(engine, "/health").status_code == 200
    engine.fail = EngineError("the engine process ended with exit code -9")
    assert post(engine, "/v1/chat/completions", CHAT).status_code == 503
    assert get(engine, "/health").status_code == 503


def test_an_engine_error_in_the_middle_of_a_stream_is_an_event_and_otherwise_a_status():
    engine = ScriptedEngine(ANSWER)
    engine.break_at = 9
    response = post(engine, "/v1/chat/completions", CHAT | {"stream": True})
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert json.loads(lines[-1][6:])["error"]["message"] == "a logit is not finite at position 3"
    assert "[DONE]" not in response.text
    assert post(engine, "/v1/chat/completions", CHAT).status_code == 503


def test_one_failed_choice_ends_the_request_and_closes_the_others():
    engine = ScriptedEngine(ANSWER)
    engine.break_at = 2
    response = post(engine, "/v1/chat/completions", CHAT | {"n": 3})
    assert response.status_code == 503
    assert engine.closed == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_aborts_its_request(stream):
    engine = ScriptedEngine([*tags(close_tag("think"), open_tag("response")), *text("hello")], endless=True)
    body = json.dumps(CHAT | {"stream": stream, "max_tokens": 300, "ignore_eos": True} | {"n": 2}).encode()

    async def main() -> None:
        sent = asyncio.Event()
        started = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not sent.is_set():
                sent.set()
                return {"type": "http.request", "body": body, "more_body": False}
            await started.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                started.set()
                await asyncio.sleep(0.001)

        if not stream:
            asyncio.get_running_loop().call_later(0.01, started.set)
            engine.script = [engine.script[0]]
            engine.endless = True
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b"",
                 "http_version": "1.1", "scheme": "http", "server": ("test", 80), "root_path": ""}
        original = engine.stream

        async def slow(request: GenerateRequest):
            async for event in original(request):
                await asyncio.sleep(0.01)
                yield event

        engine.stream = slow  # type: ignore[method-assign]
        await asyncio.wait_for(app(engine)(scope, receive, send), 20)  # type: ignore[arg-type]
        for _ in range(100):
            if engine.closed == 2:
                return
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert engine.closed == 2


def test_completions_take_text_ids_and_lists():
    for prompt, count in (("hello", 1), (["hello", " world"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2)):
        engine = ScriptedEngine(text("hello world"))
        body = post(engine, "/v1/completions", {"model": "m", "prompt": prompt, "n": 2, "max_tokens": 50}).json()
        assert len(body["choices"]) == 2 * count
        assert [c["index"] for c in body["choices"]] == list(range(2 * count))
        assert {c["text"] for c in body["choices"]} == {"hello world"}
    assert engine.requests[0].ids == (1,)
    assert engine.requests[2].ids == (2, 3)


def test_completion_logprobs_echo_and_default_length():
    engine = ScriptedEngine(text("hello world"))
    body = post(engine, "/v1/completions", {"model": "m", "prompt": "hello", "echo": True, "logprobs": 1}).json()
    (choice,) = body["choices"]
    assert engine.requests[0].sampling.max_tokens == 16
    assert choice["text"] == "hellohello world"
    table = choice["logprobs"]
    assert table["tokens"] == ["hello", "hello", " world"]
    assert table["token_logprobs"] == [None, -0.25, -0.25]
    assert table["top_logprobs"] == [None, {"hello": -0.25}, {" world": -0.25}]
    assert table["text_offset"] == [0, 5, 10]
    scored = post(ScriptedEngine([]), "/v1/completions", {"model": "m", "prompt": [1, 2, 3], "echo": True,
                                                          "logprobs": 0, "max_tokens": 0}).json()
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert scored["choices"][0]["finish_reason"] == "length"


def test_completion_stream_equals_whole():
    options = {"model": "m", "prompt": "x", "max_tokens": 50, "logprobs": 2, "stop": "rl", "return_token_ids": True}
    whole = post(ScriptedEngine(text("hello world")), "/v1/completions", options).json()["choices"][0]
    chunks = events(post(ScriptedEngine(text("hello world")), "/v1/completions", options | {"stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"] == "hello wo"
    tables = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for key, values in whole["logprobs"].items():
        assert [v for t in tables for v in t[key]] == values
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == whole["token_ids"]


@pytest.mark.parametrize(("change", "param", "part"), [
    ({"prompt": ""}, "prompt", "is empty"), ({"prompt": []}, "prompt", "empty list"),
    ({"prompt": [[]]}, "prompt", "is empty"), ({"prompt": [9999]}, "prompt", "token id 9999"),
    ({"prompt": 5}, "prompt", ""), ({"suffix": "x"}, "suffix", "not supported"), ({"best_of": 3}, "best_of", ""),
    ({"max_tokens": 0}, "max_tokens", "asks for nothing"), ({"echo": True, "stream": True}, "echo", "not supported"),
    ({"prompt": [1] * 400}, "prompt", "400 tokens, but the context is 400 tokens and at least one"),
    ({"logprobs": 21}, "logprobs", ""),
])
def test_completion_refusals(change, param, part):
    response = post(ScriptedEngine([1]), "/v1/completions", {"model": "m", "prompt": "x"} | change)
    error = response.json()["error"]
    assert response.status_code == 400
    assert part in error["message"]
    assert error["param"] == param


def test_models_tokenize_and_unknown_paths():
    engine = ScriptedEngine(ANSWER)
    listed = get(engine, "/v1/models").json()["data"]
    assert [m["id"] for m in listed] == ["m", "m:v1"]
    assert get(engine, "/v1/models/m:v1").json()["max_model_len"] == 400
    assert get(engine, "/v1/models/nope").status_code == 404
    tokens = post(engine, "/tokenize", {"prompt": "hello world"}).json()
    assert tokens["count"] == 2
    assert post(engine, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "hello world"}
    chat = post(engine, "/tokenize", {"messages": CHAT["messages"]}).json()
    post(engine, "/v1/chat/completions", CHAT)
    assert tuple(chat["tokens"]) == engine.requests[-1].ids
    assert post(engine, "/tokenize", {}).status_code == 400
    assert post(engine, "/detokenize", {"tokens": [99999]}).json()["error"]["param"] == "tokens"
    missing = get(engine, "/nope")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert get(engine, "/v1/completions").status_code == 405


def test_metrics_count_requests_and_tokens():
    engine = ScriptedEngine(ANSWER)

    async def main() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app(engine)), base_url="http://test") as client:
            await client.post("/v1/chat/completions", json=CHAT)
            await client.post("/v1/chat/completions", json=CHAT | {"n": 0})
            return (await client.get("/metrics")).text

    lines = asyncio.run(main())
    assert 'tidemill_http_requests_total{path="/v1/chat/completions",status="200"} 1.0' in lines
    assert 'tidemill_http_requests_total{path="/v1/chat/completions",status="400"} 1.0' in lines
    assert f"tidemill_completion_tokens_total {len(ANSWER)}.0" in lines
    assert 'tidemill_engine{name="running"} 1.0' in lines


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(InputError, match="tokenizer has"):
        create_app(ScriptedEngine([]), TOKENIZER, info=dataclasses.replace(INFO, vocab_size=10), models=("m",))  # type: ignore[arg-type]
