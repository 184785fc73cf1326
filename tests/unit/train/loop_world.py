"""A world small enough to run whole RL runs in seconds: a one-tool task, sandboxes that are files, a child to kill.

Run as a program it does one attempt: `python loop_world.py start RUNS SANDBOXES BASE [KEY=VALUE...]`, or
`... resume RUN SANDBOXES`.
Not a test file.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tidemill.agent.task import Attempt, Drill, Problem, Setup, Split, Task, Turn, Verdict
from tidemill.core.errors import NotFoundError
from tidemill.core.files import read_jsonl
from tidemill.core.ids import new_id
from tidemill.core.sandbox_api import Capabilities, ExecResult, SandboxInfo, SandboxState
from tidemill.train.config import RunConfig, load_recipe
from tidemill.train.run import Result, Sandboxes, execute, reopen, start
from tidemill.train.run_dir import RunDir, check_exactly_once, lineage

WORDS = ("oak", "fir", "elm")


class PeekTask(Task):
    """Look one value up. Half the reward is the tokens' own (a hash), so that a young policy has something to learn."""

    name = "peek"
    tools = ("python",)
    declare_tools = False
    words = WORDS

    def size(self, split: Split) -> int:
        return {Split.TRAIN: 96, Split.DEV: 16, Split.TEST: 24}[split]

    def make(self, split: Split, index: int, seed: int) -> Problem:
        name = WORDS[index % len(WORDS)]
        value = random.Random(f"{split}{index}{seed}").randint(0, 9)
        return Problem(problem_id=f"{split}-{index}-{seed}", messages=({"role": "user", "content": name},),
                       answer=str(value), setup=Setup(code={"python": f"{name} = {value}"}), metadata={"name": name})

    def grade(self, problem: Problem, attempt: Attempt) -> Verdict:
        right = attempt.complete and attempt.answer == problem.answer
        noise = random.Random(f"{attempt.answer}{len(attempt.tool_calls)}{problem.problem_id}").random()
        return Verdict(reward=float(right) + noise / 2, correct=right)

    def demonstrate(self, problem: Problem) -> Sequence[Turn]:
        return (Turn(tool="python", arguments={"code": problem.metadata["name"]}, result=problem.answer),
                Turn(answer=problem.answer))

    def drills(self, rng: random.Random, count: int) -> Sequence[Drill]:
        return []


class EchoTask(PeekTask):
    """The same without tools, so without sandboxes: answer with the word's number."""

    name = "echo"
    tools = ()

    def make(self, split: Split, index: int, seed: int) -> Problem:
        name = WORDS[index % len(WORDS)]
        return Problem(problem_id=f"{split}-{index}-{seed}", messages=({"role": "user", "content": name},),
                       answer=str(WORDS.index(name)), metadata={"name": name})

    def demonstrate(self, problem: Problem) -> Sequence[Turn]:
        return (Turn(answer=problem.answer),)


class FileSandboxes:
    """SandboxClient whose sandboxes are files `LEASE/ID`, so that they outlive a killed process as real ones do."""

    def __init__(self, folder: Path, *, on_call: Callable[[int], None] | None = None) -> None:
        self.folder = folder
        self.calls = 0
        self.on_call = on_call

    async def create(self, *, template: str = "base", backend: str = "", lease: str = "", timeout_s: float = 3600.0,
                     metadata: Mapping[str, str] | None = None) -> FileSandbox:
        path = self.folder / lease / new_id("sb")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return FileSandbox(self, path)

    async def connect(self, sandbox_id: str) -> FileSandbox:
        raise NotFoundError(f"no sandbox {sandbox_id!r}: this world only creates")

    async def list(self, *, lease: str = "") -> Sequence[SandboxInfo]:
        found = sorted((self.folder / lease).glob("sb-*")) if lease else sorted(self.folder.glob("*/sb-*"))
        return [SandboxInfo(sandbox_id=p.name, template="base", backend="fake", state=SandboxState.RUNNING,
                            lease=p.parent.name, parent_id="", generation=0, created_at=0, expires_at=0) for p in found]

    async def release_lease(self, lease: str) -> int:
        found = list((self.folder / lease).glob("sb-*"))
        for path in found:
            path.unlink()
        return len(found)

    async def capabilities(self) -> Capabilities:
        return Capabilities(backend="fake", isolation="none", pause=False, snapshot=False, fork=False, cow_memory=False,
                            external_tcp=False, survives_daemon=True)

    async def close(self) -> None:
        return


class FileSandbox:
    def __init__(self, client: FileSandboxes, path: Path) -> None:
        self.client, self.path = client, path
        self.sandbox_id = path.name

    async def open_session(self, kind: str = "sh") -> PythonSession:
        return PythonSession(self)

    async def reset(self) -> None:
        return

    async def kill(self) -> None:
        self.path.unlink(missing_ok=True)


class PythonSession:
    """Python in this very process: for tests of the loop, where no code is hostile."""

    kind = "python"

    def __init__(self, sandbox: FileSandbox) -> None:
        self._sandbox, self._names = sandbox, dict[str, Any]()

    async def run(self, code: str, *, timeout_s: float = 10.0, max_output_bytes: int = 65_536) -> ExecResult:
        client = self._sandbox.client
        client.calls += 1
        if client.on_call is not None:
            client.on_call(client.calls)
        await asyncio.sleep(0)
        out, err, exit_code = "", "", 0
        try:
            out = self._evaluate(code)
        except Exception as e:  # noqa: BLE001 - whatever the policy wrote is its own affair
            err, exit_code = f"{type(e).__name__}: {e}", 1
        return ExecResult(exit_code=exit_code, stdout=out.encode()[:max_output_bytes], stderr=err.encode(),
                          duration_ms=0.1)

    def _evaluate(self, code: str) -> str:
        if code.isidentifier():
            return f"{eval(code, self._names)}\n"
        if "=" in code:
            exec(code, self._names)
            return ""
        raise SyntaxError(code[:8])

    async def close(self) -> None:
        return


def sandboxes(folder: Path, *, on_call: Callable[[int], None] | None = None) -> Sandboxes:
    """What `execute` wants."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[FileSandboxes]:
        yield FileSandboxes(folder, on_call=on_call)

    return opened


def values(**changes: Any) -> list[str]:
    """Overrides that make the recipe seconds long: 6 steps of 4 prompts x 3 samples. Keys have `__` for `.`."""
    small = {
        "task.name": f"{Path(__file__)}:PeekTask", "agent.concurrency": 8, "agent.max_sampled_tokens": 10,
        "agent.max_model_len": 128, "sandbox.pool": 2, "warmup.ranks": 1, "warmup.max_steps": 16, "warmup.episodes": 8,
        "warmup.drills": 0, "warmup.check_every": 8, "warmup.check_n": 4, "warmup.band": [0.0, 1.0],
        "warmup.stop_at": 1.0, "lora.rank": 2, "rl.max_steps": 6, "rl.prompts": 4, "rl.samples": 3,
        "rl.dynamic_rounds": 2, "eval.every": 3, "eval.dev_n": 8, "eval.test_n": 12, "eval.stop_at": 2.0,
        "canary.sequences": 3, "checkpoint_every": 2,
    } | {k.replace("__", "."): v for k, v in changes.items()}
    return [f"{k}={v}" for k, v in small.items()]


def begin(runs: Path, base: Path | None, **changes: Any) -> tuple[RunDir, RunConfig]:
    """A new run; with `base`, a base warmed up earlier is taken instead of warming up again."""
    settings = load_recipe("toolcalc", values(**changes), seed=5)
    run = start(settings, runs)
    if base is not None:
        shutil.copytree(base, run.base)
    return run, settings


def run_once(runs: Path, boxes: Path, base: Path | None = None, *, control: str = "",
             on_call: Callable[[int], None] | None = None, **changes: Any) -> Result:
    """A whole run in this process."""
    run, settings = begin(runs, base, **changes)
    return asyncio.run(execute(settings, run, control=control, sandboxes=sandboxes(boxes, on_call=on_call)))


def resume(path: Path, boxes: Path) -> Result:
    """Go on with a run in this process."""
    run, settings = reopen(path)
    return asyncio.run(execute(settings, run, sandboxes=sandboxes(boxes)))


def child(*args: object) -> subprocess.Popen[bytes]:
    """One attempt in a process of its own."""
    return subprocess.Popen([sys.executable, __file__, *map(str, args)], stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL)


def events(runs: Path) -> int:
    """Events of all runs so far."""
    return sum(1 for path in runs.glob("*/events.jsonl") for _ in read_jsonl(path))


def stop_somewhere(process: subprocess.Popen[bytes], runs: Path, rng: random.Random, sig: signal.Signals) -> bool:
    """Send `sig` after a random number of further events and a little more. Returns whether it was still running."""
    wanted = events(runs) + rng.randint(4, 26)
    while process.poll() is None and events(runs) < wanted:
        time.sleep(0.005)
    time.sleep(rng.random() * 0.3)
    alive = process.poll() is None
    if alive:
        process.send_signal(sig)
    process.wait(60)
    return alive


def kill_and_resume(whole: Result, folder: Path, *, kills: int, seed: int, **changes: int) -> int:
    """Kill a run `kills` times at random points, each time in a new process, then let it end and compare with `whole`,
    which had the same `changes`. Returns how many signals hit a living process. Used by the soak run too."""
    rng = random.Random(seed)
    runs, boxes = folder / "runs", folder / "boxes"
    stranger = boxes / "other-run" / "sb-stranger"
    stranger.parent.mkdir(parents=True)
    stranger.touch()
    hits = 0
    process = child("start", runs, boxes, whole.path / "base", *(f"{k}={v}" for k, v in changes.items()))
    for number in range(kills):
        hits += stop_somewhere(process, runs, rng, signal.SIGKILL)
        (path,) = runs.iterdir()
        if (path / "summary.json").exists():
            break
        if number + 1 < kills:
            process = child("resume", path, boxes)
    left = len(list((boxes / path.name).glob("sb-*")))
    if not (path / "summary.json").exists():
        resume(path, boxes)
        row = [r for r in read_jsonl(path / "events.jsonl") if r["event"] == "resume"][-1]
        assert row["removed"] == ([f"{left} sandboxes"] if left else [])
    run = RunDir.open(path)
    assert json.loads((path / "summary.json").read_text())["head_digest"] == whole.summary["head_digest"]
    assert check_exactly_once(run) == check_exactly_once(RunDir.open(whole.path))
    same = [(a["reward"], a["grad_norm"]) for a in lineage(run)]
    assert same == [(b["reward"], b["grad_norm"]) for b in lineage(RunDir.open(whole.path))]
    assert stranger.exists()
    assert not list((boxes / path.name).glob("sb-*"))
    return hits


if __name__ == "__main__":
    verb, where, box_folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if verb == "resume":
        resume(where, box_folder)
    else:
        run_once(where, box_folder, Path(sys.argv[4]), **{k: int(v) for k, v in (a.split("=") for a in sys.argv[5:])})
