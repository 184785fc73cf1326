"""`tidemill serve` as its users meet it: the real command on a loopback port, the official openai client, a random
model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tidemill.core.launcher import start_time

COMMAND = [sys.executable, "-m", "tidemill.cli.main"]
TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object", "properties": {}}}}]
MESSAGES = [{"role": "user", "content": "hello"}]


class Server:
    """A `tidemill serve` process; its stderr goes to a file."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.log = folder / "serve.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*COMMAND, "serve", "toy", "--random-init", "--port", "0", *options],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env=os.environ | {"TMPDIR": str(folder)})
        self.url = self._wait_for_url()

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            found = re.search(r"listening on (http://\S+)/v1", self.log.read_text())
            if found:
                return found[1]
            if self.process.poll() is not None:
                raise AssertionError(self.log.read_text())
            time.sleep(0.05)
        raise AssertionError(f"not listening: {self.log.read_text()}")

    def children(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in found.split()]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("serve"), "--max-model-len", "512", "--max-running", "16")
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models_and_start_message(server: Server, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "toy"
    assert client.models.retrieve("toy").id == "toy"
    log = server.log.read_text()
    assert "random weights" in log
    assert "16 state slots x 30.8 KiB" in log
    assert httpx.get(f"{server.url}/ready").json()["status"] == "ready"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, max_completion_tokens=20)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0
    assert 0 < answer.usage.completion_tokens <= 20


def test_stream_equals_whole_with_a_seed(client: openai.OpenAI) -> None:
    options = {"model": "toy", "messages": MESSAGES, "max_tokens": 40, "seed": 5, "logprobs": True, "top_logprobs": 2,
               "reasoning_effort": "none"}
    whole = client.chat.completions.create(**options).choices[0]
    again = client.chat.completions.create(**options).choices[0]
    assert whole.message == again.message
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.message.content
    assert whole.message.content
    tokens = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    assert whole.logprobs is not None
    assert tokens == whole.logprobs.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokens)
    other = client.chat.completions.create(**(options | {"seed": 6})).choices[0]
    assert other.message.content != whole.message.content


def test_logprobs_are_those_of_the_model(client: openai.OpenAI) -> None:
    chosen = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True,
                                            top_logprobs=3).choices[0]
    assert chosen.logprobs is not None
    assert chosen.logprobs.content
    for token in chosen.logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob
        assert token.bytes == token.top_logprobs[0].bytes
        assert token.logprob < 0


def test_stop_never_leaks(client: openai.OpenAI) -> None:
    options = {"model": "toy", "messages": MESSAGES, "max_tokens": 60, "seed": 1, "reasoning_effort": "none"}
    text = client.chat.completions.create(**options).choices[0].message.content or ""
    assert len(text) > 4
    stop = text[2:4]
    cut = client.chat.completions.create(**options, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == text[: text.index(stop)]
    streamed = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(
        **options, stop=[stop], stream=True))
    assert streamed == cut.message.content


def test_several_choices_differ_and_are_reproducible(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=12, n=3, seed=9,
                                                reasoning_effort="none")
        return [c.message.content for c in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_tools_change_the_prompt_and_are_accepted(client: openai.OpenAI) -> None:
    with_tools = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=5, tools=TOOLS,
                                                tool_choice="auto")
    without = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=5)
    assert with_tools.usage is not None
    assert without.usage is not None
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call-1", "type": "function", "function": {"name": "python", "arguments": '{"code": "1"}'}}]},
        {"role": "tool", "tool_call_id": "call-1", "content": "1"}]
    assert client.chat.completions.create(model="toy", messages=history, max_tokens=5, tools=TOOLS).choices


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt=["hello", "you"], max_tokens=5, n=2, logprobs=1, echo=True)
    assert len(answer.choices) == 4
    assert answer.choices[0].text.startswith("hello")
    streamed = "".join(c.choices[0].text for c in client.completions.create(
        model="toy", prompt=[1, 2, 3], max_tokens=9, seed=3, stream=True))
    assert streamed == client.completions.create(model="toy", prompt=[1, 2, 3], max_tokens=9, seed=3).choices[0].text


def test_errors_are_the_sdks_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="but the context is 512 tokens") as caught:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "é" * 600}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="only 'auto' and 'none'"):
        client.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS, tool_choice="required")


def test_a_stream_that_is_dropped_frees_its_place(server: Server, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=400, stream=True,
                                            extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    while httpx.get(f"{server.url}/ready").json()["running"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert httpx.get(f"{server.url}/ready").json()["running"] == 0


def test_tokenize_matches_what_is_served(server: Server, client: openai.OpenAI) -> None:
    count = httpx.post(f"{server.url}/tokenize", json={"messages": MESSAGES}).json()["count"]
    usage = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == count
    assert 'path="/tokenize"' in httpx.get(f"{server.url}/metrics").text


def run(*argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, input=text, timeout=120, check=False)


def test_chat_once_and_in_turns_against_the_server(server: Server) -> None:
    once = run("chat", "--url", server.url, "--once", "hello", "--max-tokens", "8", "--seed", "2", "--effort", "none")
    assert once.returncode == 0, once.stderr
    twice = run("chat", "--url", f"{server.url}/v1", "--max-tokens", "8", "--seed", "2", "--effort", "none",
                text="hello\n/reset\nhello\n/exit\n")
    assert twice.returncode == 0, twice.stderr
    assert twice.stdout == once.stdout * 2
    refused = run("chat", "--url", server.url, "--once", "hello", "--model", "gpt")
    assert refused.returncode == 1
    assert "does not exist" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "toy", "--random-init", "--port", str(port))
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr


def test_interrupt_stops_server_and_engine(tmp_path: Path) -> None:
    server = Server(tmp_path, "--max-model-len", "128", "--max-running", "2")
    (engine,) = server.children()
    born = start_time(engine)
    assert born is not None
    assert server.stop(signal.SIGINT) == 0
    assert start_time(engine) != born
    assert "Traceback" not in server.log.read_text()


def test_a_killed_server_takes_its_engine_along(tmp_path: Path) -> None:
    server = Server(tmp_path, "--max-model-len", "128", "--max-running", "2")
    (engine,) = server.children()
    born = start_time(engine)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    deadline = time.monotonic() + 20
    while start_time(engine) == born and time.monotonic() < deadline:
        time.sleep(0.02)
    assert start_time(engine) != born
