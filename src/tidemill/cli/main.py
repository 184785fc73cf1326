"""`tidemill`: mounts one file per verb and turns deliberate errors into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 bad input or missing set-up, 130 interrupted. Only the verb that is called is imported,
so that `tidemill sandbox ls` never pays for torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer

from tidemill import __version__
from tidemill.core.errors import InputError, NotFoundError, SetupError, TidemillError
from tidemill.core.files import DISK_FULL

_VERBS: dict[str, tuple[str, str, str]] = {
    "doctor": ("tidemill.cli.doctor", "doctor", "Check this machine: kernels, numerics, sandboxes, limits."),
    "train": ("tidemill.cli.train", "app", "Pretraining and fine-tuning: pretrain, sft, list."),
    "rl": ("tidemill.cli.rl", "app", "Reinforcement learning runs: run, list, report."),
    "eval": ("tidemill.cli.eval", "evaluate", "Evaluate a task on our engine or any OpenAI-compatible endpoint."),
    "serve": ("tidemill.cli.serve", "serve", "Serve a model behind OpenAI's HTTP API."),
    "model": ("tidemill.cli.model", "app", "Models: info, convert, merge."),
    "chat": ("tidemill.cli.chat", "chat", "Talk to a served or local model."),
    "sandbox": ("tidemill.cli.sandbox", "app", "Sandboxes: setup, run, ls, rm, daemon."),
}


def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(f"tidemill {__version__}")
        raise typer.Exit


def _show_verb() -> None:
    """Stands in the help for a verb that is not called now."""


def build_app(verb: str | None) -> typer.Typer:
    """The root application with `verb` imported and every other verb listed only."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        help="Tidemill: a Kimi-K3 kind of model, its engine, forkable sandboxes and verified RL, in one package.",
    )
    app.callback(invoke_without_command=True)(_root)
    for name, (module, attribute, summary) in _VERBS.items():
        if name != verb:
            app.command(name, help=summary)(_show_verb)
            continue
        target: Any = getattr(importlib.import_module(module), attribute)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, help=summary)
        else:
            app.command(name, help=target.__doc__ or summary)(target)
    return app


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `tidemill` script."""
    args = sys.argv[1:] if argv is None else argv
    verb = next((a for a in args if not a.startswith("-")), None)
    try:
        build_app(verb)(args=args, prog_name="tidemill")
    except (InputError, NotFoundError, SetupError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except TidemillError as e:
        print(f"error: {type(e).__name__}: {e}", file=sys.stderr)
        sys.exit(1)
    except OSError as e:
        if e.errno not in DISK_FULL:
            raise
        print(f"error: cannot write {e.filename or 'a file'}: {e.strerror}. Free space and run the command again.",
              file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
