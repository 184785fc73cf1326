"""`tidemill train`: pretrain a model, fine-tune one on conversations, go on with either, list recipes.

Progress goes to stderr, the result to stdout. Ctrl-C once ends the training after its current step, twice at once;
`--for 2h` ends it when the time is up. `--resume` goes on from the last checkpoint, and the model is the same bit for
bit however often it was stopped. Exit codes: 0 done or time is up, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.core.config import to_plain
from tidemill.core.errors import ConfigError, InputError
from tidemill.core.files import DISK_FULL

if TYPE_CHECKING:
    from tidemill.train.pretrain.job import Result
    from tidemill.train.pretrain.recipe import Kind, Recipe
    from tidemill.train.run_dir import RunDir

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Pretraining and fine-tuning: pretrain, sft, list.")

EXIT_INTERRUPTED = 130
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}

RecipeName = Annotated[str, typer.Argument(help="Recipe by name, or a YAML file. Not with --resume.")]
Seed = Annotated[int | None, typer.Option(help="Seed; default: the recipe's.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE",
                                                     help="Change a value of the recipe; may be repeated.")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder in which trainings are kept.")]
Resume = Annotated[str, typer.Option(metavar="RUN", help="Go on with a training: its id, its folder, or `last`.")]
Branch = Annotated[str, typer.Option(metavar="RUN", help="A new training from the last checkpoint of another one, with "
                                                         "values changed by --set.")]
For = Annotated[str, typer.Option("--for", metavar="TIME", help="Stop after this time, e.g. 90min, 8h, 2d.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("pretrain")
def pretrain(recipe: RecipeName = "", seed: Seed = None, overrides: Overrides = None,
             runs_dir: RunsDir = Path("runs/train"), resume: Resume = "", branch: Branch = "",
             limit: For = "", dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Train a new model on local data."""
    _train("pretrain", recipe, seed, overrides or [], runs_dir, resume, branch, limit, dry_run=dry_run, as_json=as_json)


@app.command("sft")
def sft(recipe: RecipeName = "", seed: Seed = None, overrides: Overrides = None,
        runs_dir: RunsDir = Path("runs/train"), resume: Resume = "", branch: Branch = "",
        limit: For = "", dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Fine-tune a model on conversations; only what the assistant writes is learned."""
    _train("sft", recipe, seed, overrides or [], runs_dir, resume, branch, limit, dry_run=dry_run, as_json=as_json)


@app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """Recipes that come with the package."""
    from tidemill.train.pretrain.recipe import load_recipe, recipe_names

    recipes = [load_recipe(name) for name in recipe_names()]
    if as_json:
        print(json.dumps([{"name": r.name, "kind": r.kind, "about": " ".join(r.about.split())} for r in recipes]))
        return
    for r in recipes:
        print(f"{r.name}  ({r.kind}, {r.schedule.steps} steps)\n    {' '.join(r.about.split())}")


def _train(kind: Kind, name: str, seed: int | None, overrides: list[str], runs_dir: Path, resume: str, branch: str,
           limit: str, *, dry_run: bool, as_json: bool) -> None:
    """What both kinds of training are told and do."""
    seconds = _seconds(limit) if limit else None
    run, recipe = _opened(kind, name, seed, overrides, runs_dir, resume, branch, dry_run=dry_run)
    if run is None:
        _dry_run(recipe, as_json=as_json)
    else:
        _execute(recipe, run, seconds, as_json=as_json)


def _opened(kind: Kind, name: str, seed: int | None, overrides: list[str], runs_dir: Path, resume: str, branch: str, *,
            dry_run: bool) -> tuple[RunDir | None, Recipe]:
    """The run that is meant, new or old, and its recipe; no run for a dry run."""
    from tidemill.train.pretrain import job
    from tidemill.train.pretrain.recipe import load_recipe, recipe_names

    if sum(map(bool, (name, resume, branch))) != 1:
        raise InputError("give one of: a recipe, --resume RUN, --branch RUN", field="recipe",
                         remedy=f"Recipes: {', '.join(recipe_names(kind)) or 'none'}.")
    if name:
        recipe = load_recipe(name, overrides, kind=kind, seed=seed)
        if dry_run:
            return None, recipe
        print("reading the data" + (" and learning the vocabulary" if kind == "pretrain" else ""), file=sys.stderr)
        return job.start(recipe, runs_dir), recipe
    if seed is not None or dry_run or (resume and overrides):
        raise InputError("--resume goes on with the training's own recipe, --branch with values changed by --set: "
                         "other options do not fit", field="resume")
    path = _find(runs_dir, resume or branch)
    run, recipe = job.reopen(path)
    if recipe.kind != kind:
        raise ConfigError(f"{path} is of kind {recipe.kind}", field="resume",
                          remedy=f"Go on with tidemill train {recipe.kind}.")
    if branch:
        return job.branch(path, overrides, runs_dir)
    if (path / "summary.json").is_file():
        raise ConfigError(f"{path} has ended", field="resume", remedy=f"Its model is {path / 'model'}.")
    return run, recipe


def _execute(recipe: Recipe, run: RunDir, seconds: float | None, *, as_json: bool) -> None:
    from tidemill.train.pretrain.job import execute
    from tidemill.train.pretrain.live import make_view

    go_on = f"tidemill train {recipe.kind} --resume {run.path}"
    print(f"training {run.path}", file=sys.stderr)
    try:
        with _stopping(seconds) as stop, make_view(sys.stderr) as view:
            result = execute(recipe, run, listeners=(view,), stop=stop)
    except KeyboardInterrupt as e:
        print(f"interrupted; go on with: {go_on}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from e
    except OSError as e:
        if e.errno in DISK_FULL:
            print(f"cut short; go on with: {go_on}", file=sys.stderr)
        raise
    _print_result(result, as_json=as_json)
    if result.stopped_by != "steps":
        print(f"stopped by {result.stopped_by}; go on with: {go_on}", file=sys.stderr)
    if result.stopped_by == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)


@contextmanager
def _stopping(seconds: float | None) -> Generator[Callable[[], str]]:
    """A function that says why to stop: after one SIGINT or SIGTERM, or when the time is up. A second SIGINT raises
    KeyboardInterrupt."""
    until = None if seconds is None else time.monotonic() + seconds
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    def why() -> str:
        if asked:
            return "interrupted"
        return "time" if until is not None and time.monotonic() >= until else ""

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield why
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_result(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": str(result.run), "stopped_by": result.stopped_by, "step": result.step,
                          "model": str(result.model) if result.model else None}))
        return
    if result.model is None:
        return
    summary: dict[str, Any] = json.loads((result.run / "summary.json").read_text(encoding="utf-8"))
    print(f"{summary['parameters']:,} parameters, {summary['tokens']:,} tokens in {summary['steps']} steps")
    for row in summary["held_out"]:
        bits = f"  {row['bits_per_byte']:.4f} bits per byte" if row["bits_per_byte"] is not None else ""
        print(f"held out {row['source']:<20} {row['loss']:.4f} nats per token{bits}  ({row['documents']} documents)")
    print(f"model {result.model}")


def _dry_run(recipe: Recipe, *, as_json: bool) -> None:
    import yaml

    tokens = recipe.schedule.steps * recipe.batch_tokens
    if as_json:
        print(json.dumps({"recipe": to_plain(recipe), "tokens": tokens}))
        return
    print(yaml.safe_dump(to_plain(recipe), sort_keys=False), end="")
    print(f"---\n{tokens:,} tokens in {recipe.schedule.steps} steps")


def _seconds(text: str) -> float:
    """`90min` as seconds. InputError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)", text)
    if found is None or float(found[1]) == 0:
        raise InputError(f"--for {text!r}: expected a number above 0 and a unit: {', '.join(_UNITS)}", field="for")
    return float(found[1]) * _UNITS[found[2]]


def _find(runs_dir: Path, name: str) -> Path:
    """A training by id, folder or `last`. InputError naming those there are."""
    known = sorted(p.parent.name for p in runs_dir.glob("*/config.resolved.yaml"))
    if name == "last" and known:
        return runs_dir / known[-1]
    for path in (runs_dir / name, Path(name)):
        if (path / "config.resolved.yaml").is_file():
            return path
    raise InputError(f"resume = {name!r}: neither a training's folder nor one in {runs_dir}", field="resume",
                     remedy=f"There are: {', '.join(known[-8:])}." if known else "There are none yet.")
