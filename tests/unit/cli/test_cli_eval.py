"""`tidemill eval` as a user calls it: our engine, an endpoint, resume, comparison, bad input."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tidemill.cli.main import main
from tidemill.engine.random_model import write_random_model
from tidemill.model import shipped

TASK = """
from tidemill.agent.task import Problem, Split, Task

class Echo(Task):
    name = "echo"
    grades_inline = True

    def __init__(self, *, tools: tuple[str, ...] = ()):
        self.tools = tuple(tools)

    def size(self, split):
        return 40

    def make(self, split, index, seed):
        return Problem(problem_id=f"{split}-{index}", messages=({"role": "user", "content": f"say {index}"},),
                       answer=str(index))

    def grade(self, problem, attempt):
        return attempt.answer == problem.answer
"""


class Server(BaseHTTPRequestHandler):
    """Says the number it is asked for if it is even."""

    bodies: list[dict[str, Any]] = []  # noqa: RUF012 - one list for all requests on purpose
    status = 200

    def _answer(self, value: dict[str, Any]) -> None:
        raw = json.dumps(value).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).bodies.append(body | {"key": self.headers.get("Authorization", "")})
        if self.status != 200:
            self._answer({"error": {"message": "no such model"}})
            return
        number = int(body["messages"][-1]["content"].split()[-1])
        self._answer({"choices": [{"message": {"role": "assistant", "content": str(number - number % 2)},
                                   "finish_reason": "stop"}], "usage": {"completion_tokens": 7, "total_tokens": 9}})

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def endpoint() -> Iterator[str]:
    Server.bodies, Server.status = [], 200
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "echo_task.py"
    path.write_text(TASK)
    return f"{path}:Echo"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    write_random_model("tiny", folder)
    return folder


def call(*args: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *map(str, args)])
    return int(ended.value.code or 0)


def test_an_endpoint_is_evaluated_and_gone_on_with(task: str, endpoint: str, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    out = tmp_path / "out"
    options = (task, "--endpoint", endpoint, "--out", out, "--effort", "high", "--max-tokens", 50,
               "--api-key-file", key)
    assert call(*options, "--n", 6, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["n"], found["avg@1"]["point"], found["mean_sampled_tokens"]) == (6, 0.5, 7)
    assert (found["policy"]["model"], found["effort"], found["max_tokens"]) == ("served", "high", 50)
    sent = {(b["model"], b["max_tokens"], b["reasoning_effort"], b["temperature"], b["key"]) for b in Server.bodies}
    assert sent == {("served", 50, "high", 0.0, "Bearer secret")}
    assert call(*options, "--n", 10) == 0
    shown = capsys.readouterr()
    assert "6 of 10 attempts" in shown.err
    assert "avg@1" in shown.out
    assert "50.0%" in shown.out
    assert "harness endpoint, effort high, max_tokens 50" in shown.out
    assert len(Server.bodies) == 10
    assert json.loads((out / "summary.json").read_text())["n"] == 10
    assert "secret" not in "".join(p.read_text() for p in out.iterdir())


def test_attempts_an_endpoint_loses_are_reported(task: str, endpoint: str, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    Server.status = 404
    assert call(task, "--endpoint", endpoint, "--model", "x", "--n", 3, "--out", tmp_path / "out") == 1
    shown = capsys.readouterr()
    assert "lost 3" in shown.err
    assert "no such model" in shown.err
    assert "no item" in shown.out


def test_our_engine_is_evaluated_and_two_runs_compared(task: str, base: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        options = ("--base", base, "--out", tmp_path / name, "--n", 4, "--k", 2, "--max-tokens", 5, "--json")
        assert call(task, *options, "--concurrency", 4 if name == "a" else 1) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["n"], found["k"], found["temperature"], found["missing"]) == (4, 2, 1.0, 0)
        assert found["policy"]["base_digest"].startswith("sha256:")
    rows = [sorted((tmp_path / n / "items.jsonl").read_text().splitlines()) for n in ("a", "b")]
    answers = [[(r["item"], r["sample"], r["answer"]) for r in map(json.loads, part)] for part in rows]
    assert sorted(answers[0]) == sorted(answers[1])
    assert call("--compare", tmp_path / "a", tmp_path / "b") == 0
    assert "B - A  +0.0%" in capsys.readouterr().out


def test_a_task_with_tools_gets_sandboxes(task: str, endpoint: str, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    @asynccontextmanager
    async def pool(wanted: Any, tools: Any, attempts: int) -> Any:
        opened.append(attempts)
        yield None

    monkeypatch.setattr("tidemill.cli.eval._pool", pool)
    options = ("--endpoint", endpoint, "--n", 2, "--out", tmp_path / "out", "--set", "task.options.tools=[python]")
    assert call(task, *options) == 0
    assert opened == [2]
    assert Server.bodies[0]["tools"][0]["function"]["name"] == "python"
    assert call(task, *options) == 0
    assert opened == [2], "nothing is missing, so no sandbox is made"


def test_a_training_run_names_base_and_newest_adapter(task: str, base: Path, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "base").symlink_to(base)
    assert call(task, "--run", run, "--n", 1, "--max-tokens", 2, "--out", tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["policy"]["adapter_version"] == "0"
    (run / "adapters" / "v0001").mkdir(parents=True)
    assert call(task, "--run", run, "--n", 1, "--out", tmp_path / "other") == 1
    assert "adapter_config.json" in capsys.readouterr().err, "the newest adapter is taken, and an empty one is refused"


@pytest.mark.parametrize(("args", "says"), [
    ((), "name a recipe or a task"),
    (("nonsense", "--endpoint", "http://127.0.0.1:1/v1"), "neither a recipe"),
    (("ledger",), "--base"),
    (("ledger", "--base", "x", "--endpoint", "http://127.0.0.1:1/v1"), "either --base"),
    (("ledger", "--endpoint", "http://127.0.0.1:1/v1", "--adapter", "x"), "--adapter needs --base"),
    (("ledger", "--endpoint", "127.0.0.1"), "endpoint = '127.0.0.1'"),
    (("ledger", "--base", "nowhere"), "nowhere"),
    (("ledger", "--run", "nowhere"), "holds no base model"),
    (("toolcalc", "--endpoint", "http://127.0.0.1:1/v1", "--model", "m", "--n", "100000"), "n = 100000"),
    (("toolcalc", "--endpoint", "http://127.0.0.1:1/v1", "--set", "agent.colour=red"), "unknown key"),
    (("gym", "--endpoint", "http://127.0.0.1:1/v1", "--api-key-file", "nowhere"), "cannot read nowhere"),
    (("--compare", "nowhere", "nowhere"), "no evaluation"),
    (("ledger", "--compare", "a", "b"), "nothing else"),
])
def test_bad_input_is_one_line_and_code_2(args: tuple[str, ...], says: str, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*args) == 2
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("error: ")
    assert says in shown
    assert len(shown.splitlines()) == 1


def test_tools_that_need_no_sandbox_start_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shipped, "_root", lambda: tmp_path)
    monkeypatch.setenv("TIDEMILL_STATE", str(tmp_path / "state"))
    write_random_model("toy", tmp_path / "pico")
    options = ("toolbox", "--base", "pico", "--out", tmp_path / "out", "--max-tokens", 4)
    assert call(*options, "--n", 2, "--json") == 0
    assert json.loads(capsys.readouterr().out)["n"] == 2
    assert not (tmp_path / "state").exists()
