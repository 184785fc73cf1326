"""docs/tasks.md: every code block is written to a file, loaded by the name a recipe would use, and played."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill.agent.episode import Draw, Episode, run_episode
from tidemill.agent.pool import SandboxPool
from tidemill.agent.registry import load_object
from tidemill.agent.scaffold import Scaffold
from tidemill.agent.task import Attempt, Demonstrator, Split, load_task
from tidemill.agent.tool import load_tool
from tidemill.core.outcomes import Outcome
from tidemill.core.sandbox_api import ExecResult
from tidemill.model.chat.codec import ChatCodec
from tidemill.model.chat.tokenizer import build_tokenizer

PAGE = Path(__file__).parents[3] / "docs" / "tasks.md"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files; modules imported from it are forgotten afterwards."""
    blocks = re.findall(r"```python\n# file: (\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert [name for name, _ in blocks] == ["words.py", "vault.py", "rewards.py", "lookup.py", "count.py"]
    for name, text in blocks:
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert len([line for line in text.splitlines() if line.strip()]) <= 40, f"{name} is about 30 lines"
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("vault", "words") or name.startswith("tidemill_user_"):
            del sys.modules[name]


def play(stage: Any, task: Any, policy: Any, tools: tuple[str, ...] = (), *, declare: bool = False) -> Episode:
    stage.task, stage.policy = task, policy
    stage.settings = replace(stage.settings, max_model_len=1024)
    made = [load_tool(name) for name in tools]

    async def main() -> Episode:
        kinds = tuple({t.session for t in made if t.session})
        async with SandboxPool(stage.service, size=1, lease="docs", sessions=kinds) as pool:
            harness = stage.harness(pool, tools=made, scaffold=Scaffold(stage.codec, made, declare=declare))
            return await run_episode(harness, task.make(Split.DEV, 3, 1), Draw(seed=0, sequence=0, temperature=1.0),
                                     episode_id="e")

    return asyncio.run(main())


def scripted(stage: Any, choices: list[str]) -> Any:
    """Fills the slots with these texts in turn."""
    close = stage.codec.vocabulary.control.close
    left = iter(choices)

    def policy(text: str, request: Any) -> list[int]:
        end = stage.codec.encode(['"']) if text.endswith('tool="') else [close]
        return [*stage.codec.encode([next(left)]), *end]

    return policy


def test_task(stage: Any, page: Path) -> None:
    options = yaml.safe_load(re.search(r"```yaml\n(task:\n  name: words.*?)```", PAGE.read_text(), re.S)[1])["task"]
    task = load_task(str(page / options["name"]), options["options"])
    assert sum(task.size(s) for s in Split) == 6**3
    answer = task.make(Split.DEV, 3, 1).answer
    assert play(stage, task, scripted(stage, [answer])).outcome is Outcome.OK
    assert play(stage, task, scripted(stage, [answer + "x"])).outcome is Outcome.WRONG


def test_data_in_the_sandbox_and_rewards(stage: Any, page: Path) -> None:
    task = load_task(f"{page / 'vault.py'}:Vault")
    assert isinstance(task, Demonstrator)
    answer = task.make(Split.DEV, 3, 1).answer
    choices = ["", "python", "secret", answer]
    episode = play(stage, task, scripted(stage, choices), task.tools)
    assert (episode.outcome, episode.tool_calls[0].result.text) == (Outcome.OK, answer)
    codec = ChatCodec(build_tokenizer(task.words))
    shown = Scaffold(codec, [load_tool("python")], declare=False).demonstration(
        task.make(Split.DEV, 3, 1), task.demonstrate(task.make(Split.DEV, 3, 1)))
    assert shown.num_sampled < 15

    graded = load_task(f"{page / 'rewards.py'}:Graded")
    wrong = answer[:2] + ("1" if answer[2] == "0" else "0")
    assert play(stage, graded, scripted(stage, choices), task.tools).reward == 1.0
    episode = play(stage, graded, scripted(stage, [*choices[:3], wrong]), task.tools)
    assert episode.reward == pytest.approx(0.2)

    inside = load_task(f"{page / 'rewards.py'}:LooksInside")
    episode = play(stage, inside, scripted(stage, choices), task.tools)
    assert episode.outcome is Outcome.INFRA_ERROR, "the fake sandbox keeps no files, and the grader asks for one"

    class Box:
        async def read_file(self, path: str) -> bytes:
            return answer.encode()

    attempt = Attempt(answer="", complete=True, sandbox=Box())  # type: ignore[arg-type]
    assert asyncio.run(inside.grade(task.make(Split.DEV, 3, 1), attempt)).correct


def test_tools(stage: Any, page: Path) -> None:
    lookup = f"{page / 'lookup.py'}:Lookup"
    task = load_task(f"{page / 'words.py'}:Reverse")
    for country, told, ok in (("Japan", "Tokyo", True), ("Atlantis", "error: unknown country", False)):
        episode = play(stage, task, scripted(stage, ["", "lookup", country, "x"]), (lookup,), declare=True)
        assert (episode.tool_calls[0].result.text, episode.tool_calls[0].result.ok) == (told, ok)

    class Bench:
        from tidemill.agent.tool import ToolLimits
        limits = ToolLimits()

        async def run(self, kind: str, code: str) -> ExecResult:
            assert (kind, code) == ("sh", "wc -l < 'a file'")
            return ExecResult(exit_code=0, stdout=b"3\n", stderr=b"", duration_ms=1.0)

    count = load_tool(f"{page / 'count.py'}:CountLines")
    assert asyncio.run(count.call({"path": "a file"}, Bench())).text == "3"  # type: ignore[arg-type]


def test_yaml_blocks_name_real_options(page: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        task = yaml.safe_load(block)["task"]
        name = task["name"] if task["name"] == "gym" else str(page / task["name"])
        assert load_task(name, task["options"]).size(Split.DEV) > 0
    assert load_object("python", {"python": "tidemill.agent.tools.python:PythonTool"}, kind="tool").name == "python"
