"""`tidemill rl`: run a recipe, list recipes, write a run's report again.

Progress goes to stderr, the result to stdout. Ctrl-C once ends the run after its current step, twice at once; either
way nothing is left running and `--resume` goes on from the last checkpoint. Exit codes: 0 done (a control: it behaved
as its recipe says), 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.core.config import to_plain
from tidemill.core.errors import ConfigError, InputError
from tidemill.core.files import DISK_FULL
from tidemill.train.config import CONTROLS, RunConfig, load_recipe, recipe_names

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Reinforcement learning runs: run, list, report.")

EXIT_INTERRUPTED = 130

RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder in which runs are kept.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("run")
def run(
    recipe: Annotated[str, typer.Argument(help="Recipe by name, or a YAML file. Not with --resume.")] = "",
    seed: Annotated[int | None, typer.Option(help="Seed; default: the recipe's.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE",
                                                        help="Change a value of the recipe; may be repeated.")] = None,
    runs_dir: RunsDir = Path("runs"),
    resume: Annotated[str, typer.Option(metavar="RUN", help="Go on with a run: its id, its folder, or `last`.")] = "",
    control: Annotated[str, typer.Option(metavar="NAME", help=f"Plant a fault: {', '.join(CONTROLS)}.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done and what it costs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train by reinforcement: warm-up, RL with verified adapter syncs, report."""
    if bool(recipe) == bool(resume):
        raise InputError("give either a recipe or --resume RUN", field="recipe",
                         remedy=f"Recipes: {', '.join(recipe_names())}.")
    if resume:
        if overrides or seed is not None or dry_run:
            raise InputError("--resume goes on with the run's own configuration: --set, --seed and --dry-run do not "
                             "fit", field="resume")
        _resume(runs_dir, resume, control=control, as_json=as_json)
        return
    config = load_recipe(recipe, overrides or (), seed=seed)
    if control:
        _check_control(config, control)
    if dry_run:
        _dry_run(config, as_json=as_json)
        return
    _start(config, runs_dir, control=control, as_json=as_json)


@app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """Recipes that come with the package."""
    rows: list[dict[str, Any]] = []
    for name in recipe_names():
        config = load_recipe(name)
        rows.append({"name": name, "task": config.task.name, "about": " ".join(config.about.split()),
                     "controls": list(config.controls)})
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['name']}  (task {row['task']}; controls: {', '.join(row['controls']) or 'none'})")
        print(f"    {row['about']}")


@app.command("report")
def report(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="Id or folder of a run, or `last`.")],
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write report.html of a run (also of one that has not ended) and print its path."""
    from tidemill.model.chat.tokenizer import Tokenizer
    from tidemill.train.report import write_report
    from tidemill.train.run_dir import RunDir

    path = _find(runs_dir, run_name)
    folder = RunDir.open(path)
    tokenizer = Tokenizer.load(folder.base)
    print(write_report(folder, tokenizer.decode))


def _find(runs_dir: Path, name: str) -> Path:
    """A run by id, folder or `last`. InputError naming the runs there are."""
    from tidemill.train.run import newest_run

    if name == "last":
        return newest_run(runs_dir)
    for path in (runs_dir / name, Path(name)):
        if (path / "config.resolved.yaml").is_file():
            return path
    known = sorted(p.parent.name for p in runs_dir.glob("*/config.resolved.yaml"))
    raise InputError(f"run = {name!r}: neither a run folder nor a run in {runs_dir}", field="run",
                     remedy=f"There are: {', '.join(known[-8:])}." if known else "There are none yet.")


def _check_control(config: RunConfig, control: str) -> None:
    from tidemill.train.controls import control_settings

    control_settings(config, control)


def _dry_run(config: RunConfig, *, as_json: bool) -> None:
    import yaml

    from tidemill.train.budget import budget
    from tidemill.train.parts import Plan

    costs = budget(config, Plan.of(config))
    if as_json:
        print(json.dumps({"config": to_plain(config), "budget": costs.to_json()}))
        return
    print(yaml.safe_dump(to_plain(config), sort_keys=False), end="")
    print("---")
    for line in costs.lines():
        print(line)


def _start(config: RunConfig, runs_dir: Path, *, control: str, as_json: bool) -> None:
    from tidemill.train.run import start

    _execute(config, start(config, runs_dir), control=control, as_json=as_json)


def _resume(runs_dir: Path, name: str, *, control: str, as_json: bool) -> None:
    from tidemill.train.run import reopen

    path = _find(runs_dir, name)
    if (path / "summary.json").is_file():
        stopped = json.loads((path / "summary.json").read_text())["stopped_by"]
        raise ConfigError(f"{path} has ended (stopped by {stopped})", field="resume",
                          remedy=f"Its report is {path / 'report.html'}.")
    folder, config = reopen(path)
    planted = _planted(path)
    if planted is None:
        planted = control
    if control and control != planted:
        raise ConfigError(f"control = {control!r}: {path.name} was started with {planted or 'none'}", field="control")
    _execute(config, folder, control=planted, as_json=as_json)


def _planted(path: Path) -> str | None:
    """The control a run was started with; empty if it was none, None if the run never started."""
    from tidemill.core.files import read_jsonl

    return next((row.get("control", "") for row in read_jsonl(path / "events.jsonl") if row["event"] == "start"), None)


def _execute(config: RunConfig, folder: Any, *, control: str, as_json: bool) -> None:
    from tidemill.train.live import make_view
    from tidemill.train.run import execute

    print(f"run {folder.path}", file=sys.stderr)
    try:
        with make_view(sys.stderr) as view:
            result = asyncio.run(execute(config, folder, listeners=[view], control=control))
    except (KeyboardInterrupt, asyncio.CancelledError) as e:
        raise _interrupted(folder.path) from e
    except OSError as e:
        if e.errno in DISK_FULL:
            print(f"cut short; go on with: tidemill rl run --resume {folder.path}", file=sys.stderr)
        raise
    _print_result(result.summary, result.path, result.control, as_json=as_json)
    if result.stopped_by == "interrupted":
        raise _interrupted(folder.path)
    if result.control is not None:
        raise typer.Exit(0 if result.control.behaved else 1)
    if result.stopped_by not in ("dev", "steps"):
        raise typer.Exit(1)


def _interrupted(path: Path) -> typer.Exit:
    print(f"interrupted; go on with: tidemill rl run --resume {path}", file=sys.stderr)
    return typer.Exit(EXIT_INTERRUPTED)


def _print_result(summary: dict[str, Any], path: Path, control: Any, *, as_json: bool) -> None:
    if as_json:
        verdict = control.to_json() if control is not None else None
        print(json.dumps({"run": str(path), "summary": summary, "control": verdict}))
        return
    for line in result_lines(summary):
        print(line)
    if control is not None:
        print(f"control {control.name}: {'behaved as the recipe says' if control.behaved else 'DID NOT BEHAVE'} "
              f"({control.expect}; {control.why})")
    print(f"report {path / 'report.html'}")


def result_lines(summary: dict[str, Any]) -> list[str]:
    """What a run found, for people."""
    lines: list[str] = []
    for when in ("before", "after"):
        accuracy, interval = summary[f"test_{when}"], summary[f"ci95_{when}"]
        if accuracy is not None:
            lines.append(f"test accuracy {when + ' RL':<9} {accuracy:6.1%}  [{interval[0]:.1%}, {interval[1]:.1%}]  "
                         f"n = {summary['test_n']}")
    lines.append(f"stopped by {summary['stopped_by']} after {summary['steps']} steps, {summary['wall_s']:.0f} s "
                 f"(set-up {summary['setup_s']:.0f} s)")
    lines.append(f"sandboxes used {summary['sandboxes_used']}, left over {summary['sandboxes_left']}; "
                 f"{summary['tool_calls']} tool calls, {summary['infra_errors']} infrastructure errors")
    lines.append(f"adapter syncs {summary['syncs']}, verified {summary['syncs_verified']}; "
                 f"kl(engine, trainer) {summary['kl_last'] or 0.0:.1e}; head {summary['head_digest'][:19]}")
    return lines

