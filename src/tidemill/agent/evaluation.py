"""Evaluations as folders that can be gone on with: what was asked, one row per attempt, what it adds up to.

    OUT/  eval.json     task, split, sampling, limits, harness and policy: all that must be equal to go on
          items.jsonl   one row per attempt, appended as it ends; attempts lost to infrastructure are tried again
          summary.json  accuracy with intervals

Attempt j of item i draws its random numbers from (seed, i * k + j), so neither order nor interruption changes a result.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tidemill.agent.episode import Draw, Episode
from tidemill.agent.rollout import EpisodeRequest, Play, run_requests
from tidemill.agent.stats import bootstrap_mean, mcnemar, pass_at_k, wilson
from tidemill.agent.task import Split, Task
from tidemill.core.config import require
from tidemill.core.errors import InputError, IntegrityError, SetupError
from tidemill.core.files import append_jsonl, read_jsonl, write_json
from tidemill.core.outcomes import Outcome

Row = dict[str, Any]
_EXTENDABLE = frozenset(("n",))
"""Fields that may change when an evaluation is gone on with."""


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """What is evaluated, how, and with whom.

    n, k        items of the split, attempts at each
    seed        of problems and sampling
    harness     `forced` or `free` (our engine, see agent.scaffold) or `endpoint` (messages and tools over HTTP)
    max_tokens  sampled tokens: of a whole episode over our engine, of a turn over an endpoint
    effort      thinking effort asked for; empty: the model's default
    limits      the other limits, by name
    policy      who answers: model, digests, endpoint
    """

    task: str
    options: Mapping[str, Any]
    split: str
    n: int
    k: int
    seed: int
    temperature: float
    harness: str
    max_tokens: int
    effort: str
    limits: Mapping[str, float]
    policy: Mapping[str, str]
    version: str

    def __post_init__(self) -> None:
        for name in ("n", "k", "max_tokens"):
            require(getattr(self, name) >= 1, field=name, value=getattr(self, name), expected="an integer >= 1")
        require(0 <= self.temperature <= 100, field="temperature", value=self.temperature, expected="0 to 100")

    @classmethod
    def read(cls, folder: Path) -> EvalSpec:
        """Of an evaluation on disk. Raises InputError if there is none."""
        try:
            return cls(**json.loads((folder / "eval.json").read_text(encoding="utf-8")))
        except FileNotFoundError as e:
            raise InputError(f"{folder} is no evaluation: it has no eval.json", field="out") from e
        except (OSError, ValueError, TypeError) as e:
            raise IntegrityError(f"{folder / 'eval.json'} cannot be read: {e}") from e


@dataclass(kw_only=True)
class Evaluation:
    """One folder and the rows in it. `rows` holds the last graded attempt of each (item, sample)."""

    folder: Path
    spec: EvalSpec
    rows: dict[tuple[int, int], Row] = field(default_factory=dict[tuple[int, int], Row])
    kept: int = 0
    """Rows that were there already."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """Reasons of attempts that `run` lost to infrastructure."""

    @classmethod
    def open(cls, folder: Path, spec: EvalSpec) -> Evaluation:
        """A new folder, or one that holds an evaluation of the same spec (`n` may grow). Raises InputError naming the
        first field that differs."""
        if (folder / "eval.json").exists():
            earlier = EvalSpec.read(folder)
            for name, value in asdict(spec).items():
                before = asdict(earlier)[name]
                if name not in _EXTENDABLE and before != value:
                    raise InputError(f"{folder} holds an evaluation with {name} = {before!r}, not {value!r}",
                                     field=name, remedy="Give another --out, or the same options to go on.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(f"cannot write to {folder}: {e.strerror}", field="out") from e
        made = cls(folder=folder, spec=spec)
        write_json(folder / "eval.json", asdict(spec))
        _drop_torn_line(made.items)
        made.rows = _read_rows(folder, spec)
        made.kept = len(made.rows)
        return made

    @classmethod
    def read(cls, folder: Path) -> Evaluation:
        """An evaluation on disk, as far as it got."""
        spec = EvalSpec.read(folder)
        return cls(folder=folder, spec=spec, rows=_read_rows(folder, spec))

    @property
    def items(self) -> Path:
        return self.folder / "items.jsonl"

    @property
    def missing(self) -> list[tuple[int, int]]:
        """(item, sample) without a graded attempt."""
        spec = self.spec
        return [(i, j) for i in range(spec.n) for j in range(spec.k) if (i, j) not in self.rows]

    async def run(self, task: Task, play: Play, *, concurrency: int,
                  progress: Callable[[int, int], None] | None = None) -> None:
        """Make the missing attempts; each is on disk as soon as it ends. Raises SetupError if it cannot be written."""
        spec = self.spec
        places: dict[str, tuple[int, int]] = {}
        requests: list[EpisodeRequest] = []
        for i, j in self.missing:
            name = f"{spec.split}-{i}-{j}"
            places[name] = (i, j)
            requests.append(EpisodeRequest(
                episode_id=name, problem=task.make(Split(spec.split), i, spec.seed),
                draw=Draw(seed=spec.seed, sequence=i * spec.k + j, temperature=spec.temperature)))

        async def recorded(request: EpisodeRequest) -> Episode:
            episode = await play(request)
            place = places[request.episode_id]
            row = _row(*place, episode)
            append_jsonl(self.items, row)
            if episode.outcome is Outcome.INFRA_ERROR:
                self.failures[episode.error] += 1
            else:
                self.rows[place] = row
            return episode

        try:
            await run_requests(recorded, requests, concurrency=concurrency, progress=progress)
        except ExceptionGroup as group:
            disk, rest = group.split(OSError)
            if disk is None or rest is not None:
                raise
            raise SetupError(f"cannot write {self.items}: {disk.exceptions[0]}",
                             remedy="Free some space and run again with the same --out.") from group

    def summary(self) -> dict[str, Any]:
        """Accuracy with 95 % intervals. Items without a graded attempt are left out and counted in `missing`."""
        spec = self.spec
        marks = list(_marks(self).values())
        tries = [1 << p for p in range(spec.k.bit_length()) if 1 << p <= spec.k]
        if spec.k not in tries:
            tries.append(spec.k)
        rows = list(self.rows.values())
        return {
            "task": spec.task, "split": spec.split, "n": len(marks), "k": spec.k, "missing": len(self.missing),
            f"avg@{spec.k}": _estimate([sum(m) / len(m) for m in marks]),
            "pass": {f"pass@{k}": _estimate([pass_at_k(len(m), sum(m), k) for m in marks if len(m) >= k])
                     for k in tries},
            "outcomes": dict(sorted(Counter(row["outcome"] for row in rows).items())),
            "mean_reward": _mean([row["reward"] for row in rows]),
            "mean_sampled_tokens": _mean([row["sampled_tokens"] for row in rows]),
            "tool_calls": sum(len(row["tool_calls"]) for row in rows), "harness": spec.harness, "effort": spec.effort,
            "max_tokens": spec.max_tokens, "limits": dict(spec.limits), "temperature": spec.temperature,
            "seed": spec.seed, "policy": dict(spec.policy),
        }


def compare(a: Evaluation, b: Evaluation) -> dict[str, Any]:
    """B against A on the items both have: paired bootstrap of the difference, and McNemar's test if k = 1 in both.

    Raises InputError if they asked different questions or share no item.
    """
    for name in ("task", "options", "split", "seed"):
        of_a, of_b = getattr(a.spec, name), getattr(b.spec, name)
        if of_a != of_b:
            raise InputError(f"the runs are not comparable: {name} is {of_a!r} in A and {of_b!r} in B", field="compare")
    marks_a, marks_b = _marks(a), _marks(b)
    shared = sorted(marks_a.keys() & marks_b.keys())
    if not shared:
        raise InputError("the runs have no item in common", field="compare")
    mean_a = [sum(marks_a[i]) / len(marks_a[i]) for i in shared]
    mean_b = [sum(marks_b[i]) / len(marks_b[i]) for i in shared]
    differences = [y - x for x, y in zip(mean_a, mean_b, strict=True)]
    low, high = bootstrap_mean(differences)
    result: dict[str, Any] = {
        "a": str(a.folder), "b": str(b.folder), "task": a.spec.task, "split": a.spec.split, "n": len(shared),
        "accuracy_a": _mean(mean_a), "accuracy_b": _mean(mean_b),
        "difference": {"point": _mean(differences), "lo95": low, "hi95": high, "method": "paired bootstrap"},
        "differing_settings": _differing(a.spec, b.spec),
    }
    if a.spec.k == b.spec.k == 1:
        only_a = sum(x > y for x, y in zip(mean_a, mean_b, strict=True))
        only_b = sum(y > x for x, y in zip(mean_a, mean_b, strict=True))
        result["mcnemar"] = {"only_a": only_a, "only_b": only_b, "p": mcnemar(only_a, only_b)}
    return result


def _row(item: int, sample: int, episode: Episode) -> Row:
    return {
        "item": item, "sample": sample, "problem_id": episode.problem_id, "outcome": episode.outcome.value,
        "correct": episode.verdict is not None and episode.verdict.correct, "reward": episode.reward,
        "answer": episode.answer, "detail": episode.verdict.detail if episode.verdict else "", "turns": episode.turns,
        "sampled_tokens": episode.usage.get("completion_tokens", episode.log.num_sampled),
        "total_tokens": len(episode.log) or episode.usage.get("total_tokens", 0),
        "tool_calls": [{"tool": c.tool, "arguments": dict(c.arguments), "result": c.result.text, "ok": c.result.ok}
                       for c in episode.tool_calls],
        "seconds": round(episode.seconds, 4), "error": episode.error,
    }


def _read_rows(folder: Path, spec: EvalSpec) -> dict[tuple[int, int], Row]:
    rows: dict[tuple[int, int], Row] = {}
    try:
        for row in read_jsonl(folder / "items.jsonl"):
            place = int(row["item"]), int(row["sample"])
            if row["outcome"] != Outcome.INFRA_ERROR.value and place[0] < spec.n and place[1] < spec.k:
                rows[place] = row
    except (ValueError, KeyError, TypeError) as e:
        raise IntegrityError(f"{folder / 'items.jsonl'} is damaged: {e}") from e
    return rows


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that a kill left half written, so that the next row starts on a line of its own."""
    if not path.exists():
        return
    with path.open("rb+") as f:
        data = f.read()
        f.truncate(data.rfind(b"\n") + 1)


def _marks(evaluation: Evaluation) -> dict[str, list[bool]]:
    """Correctness of the attempts at each item, by problem id, in order of item and sample."""
    marks: dict[str, list[bool]] = {}
    for place in sorted(evaluation.rows):
        row = evaluation.rows[place]
        marks.setdefault(str(row["problem_id"]), []).append(bool(row["correct"]))
    return marks


def _estimate(values: Sequence[float]) -> dict[str, Any]:
    """Mean over items with a 95 % interval: Wilson's if every value is 0 or 1, else a bootstrap over items."""
    if not values:
        return {"point": None, "lo95": 0.0, "hi95": 1.0, "n": 0, "method": "none"}
    shares = all(v in (0.0, 1.0) for v in values)
    low, high = wilson(round(sum(values)), len(values)) if shares else bootstrap_mean(values)
    return {"point": _mean(values), "lo95": low, "hi95": high, "n": len(values),
            "method": "wilson" if shares else "bootstrap"}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _differing(a: EvalSpec, b: EvalSpec) -> dict[str, list[Any]]:
    one, other = asdict(a), asdict(b)
    return {name: [one[name], other[name]] for name in one if one[name] != other[name]}
