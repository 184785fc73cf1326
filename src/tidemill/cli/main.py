"""`tidemill`: mounts one file per verb and turns deliberate errors into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 bad input or missing set-up, 130 interrupted. Sub-commands are imported when used, so that
`tidemill sandbox ls` never pays for torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click
import typer
from typer.core import TyperGroup

from tidemill import __version__
from tidemill.core.errors import InputError, NotFoundError, SetupError, TidemillError

_COMMANDS: dict[str, tuple[str, str, str]] = {
    "doctor": ("tidemill.cli.doctor", "doctor", "Check this machine: kernels, numerics, sandboxes, limits."),
    "rl": ("tidemill.cli.rl", "app", "Reinforcement learning runs: run, list, report."),
    "eval": ("tidemill.cli.eval", "evaluate", "Evaluate a recipe's task on our engine or any OpenAI endpoint."),
    "serve": ("tidemill.cli.serve", "serve", "Serve a model behind OpenAI's HTTP API."),
    "chat": ("tidemill.cli.chat", "chat", "Talk to a served or local model."),
    "sandbox": ("tidemill.cli.sandbox", "app", "Sandboxes: setup, run, ls, rm, daemon."),
}


class LazyGroup(TyperGroup):
    """A command group whose members are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, attribute, summary = entry
        target: Any = getattr(importlib.import_module(module), attribute)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command(name=cmd_name)(target)
            target = single
        command = typer.main.get_command(target)
        command.name = cmd_name
        command.short_help = summary
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, _, summary) in _COMMANDS.items()])


app = typer.Typer(
    cls=LazyGroup, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True,
    help="Tidemill: a Kimi-K3 kind of model, its engine, forkable sandboxes and verified RL, in one package.",
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Options before any command."""
    if version:
        print(f"tidemill {__version__}")
        raise typer.Exit


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `tidemill` script."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=argv, prog_name="tidemill", standalone_mode=False)
    except click.exceptions.Exit as e:
        code = e.exit_code
    except click.ClickException as e:
        e.show()
        code = 2
    except (InputError, NotFoundError, SetupError) as e:
        print(f"error: {e}", file=sys.stderr)
        code = 2
    except TidemillError as e:
        print(f"error: {type(e).__name__}: {e}", file=sys.stderr)
        code = 1
    except (KeyboardInterrupt, click.exceptions.Abort):
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
