"""What a person sees on stderr while a run goes on: a live panel on a terminal, one line per event elsewhere.

A listener of tidemill.train.metrics; it changes nothing and never raises because a field is missing.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]

_SPARK = "▁▂▃▄▅▆▇█"


def step_line(row: Row, max_steps: int, eta_s: float | None) -> str:
    """One step in one line."""
    seconds = sum(row.get("seconds", {}).values())
    rate = row.get("total_tokens", 0) / seconds if seconds else 0.0
    drops = row.get("drops", {})
    parts = [
        f"step {row['step']:>3}/{max_steps}", f"reward {row.get('reward', 0):+.3f}",
        f"correct {row.get('accuracy', 0):.1%}",
        f"groups {row.get('groups', 0)}" + (f" (dropped {sum(drops.values())})" if drops else ""),
        f"kl {row.get('kl_k3', 0):.1e}", f"grad {row.get('grad_norm', 0):.2f}", f"{rate:,.0f} tok/s",
        f"{row.get('tool_calls', 0)} calls at {row.get('tool_ms', 0):.1f} ms", f"{seconds:.1f} s",
    ]
    if eta_s is not None:
        parts.append(f"at most {clock(eta_s)} left")
    return "  ".join(parts)


def event_line(kind: str, row: Row) -> str | None:
    """Any other event in one line, or None if it is not worth one."""
    if kind == "start":
        return f"{row.get('recipe', '')}: seed {row.get('seed', '')}, at most {row.get('max_steps', '?')} steps"
    if kind == "resume":
        removed = ", ".join(row.get("removed", [])) or "nothing was left over"
        return f"resumed from step {row['from_step']}; removed: {removed}"
    if kind == "setup":
        return f"{row.get('what', '')} ({row.get('seconds', 0):.1f} s)"
    if kind == "warmup" and row["step"] % 10 == 0:
        return f"warm-up {row['step']:>3}  loss {row['loss']:.3f}  dev demonstrations {row['accuracy']:.1%}"
    if kind == "warmup_end":
        how = "stopped early on purpose" if row["stopped_early"] else "ran to its limit"
        return f"warm-up {how} after {row['steps']} steps at {row['accuracy']:.1%} ({row.get('seconds', 0):.0f} s)"
    if kind == "eval":
        return (f"{row['split']} accuracy at step {row['step']}: {row['accuracy']:.1%} "
                f"[{row['lo95']:.1%}, {row['hi95']:.1%}], n = {row['n']}")
    if kind == "floor":
        return f"canary floor {row['floor']:.1e}, threshold {row['threshold']:.1e} nats per token"
    if kind == "canary" and row.get("fires"):
        return (f"CANARY v{row['version']}: {row['fires']} (trainer moved {row['trainer_moved']:.1e}, engine missed "
                f"{row['missed']:.1e} nats per token)")
    if kind == "control":
        return f"control {row['name']}: {row['verdict']}"
    if kind == "stop":
        return f"stopped by {row['stopped_by']} after step {row['step']}"
    return None


def clock(seconds: float) -> str:
    """`3:07`."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def sparkline(values: list[float], *, width: int = 40) -> str:
    """The last `width` values of [0, 1] as small bars."""
    return "".join(_SPARK[min(7, max(0, int(v * 8)))] for v in values[-width:])


class Eta:
    """Seconds to the last step at the pace of recent steps; an upper bound, since a run may stop earlier."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._marks: list[tuple[int, float]] = []

    def after(self, step: int, max_steps: int) -> float | None:
        """Note the end of a step; None before the second one."""
        self._marks = [*self._marks, (step, self._now())][-8:]
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (max_steps - step) * (ended - began) / (last - first) if last > first else None


class Lines:
    """Lines on a stream; for logs and pipes. What makes them of events is a subclass's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._eta = Eta()
        self._max_steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.flush()

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """Progress within a phase is for terminals."""

    def say(self, line: str | None) -> None:
        """Write a line; None is not worth one."""
        if line is not None:
            self._stream.write(line + "\n")
            self._stream.flush()


class Redrawn(ABC):
    """A panel that is redrawn in place; lines worth keeping scroll away above it."""

    def __init__(self, console: Console, *, refresh_per_second: int) -> None:
        self._console = console
        self._eta = Eta()
        self._left: float | None = None
        self._max_steps = 0
        self._began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=refresh_per_second, transient=True,
                          get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.__exit__(None, None, None)

    def say(self, line: str | None) -> None:
        """A line above the panel; None is not worth one."""
        if line is not None:
            self._live.console.print(Text(line), highlight=False)

    @abstractmethod
    def _render(self) -> Panel: ...


class PlainView(Lines):
    """One line per event."""

    def on_event(self, kind: str, row: Row) -> None:
        if kind == "start":
            self._max_steps = int(row.get("max_steps", 0))
        if kind == "step":
            line = step_line(row, self._max_steps, self._eta.after(int(row["step"]), self._max_steps))
        else:
            line = event_line(kind, row)
        self.say(line)


class RichView(Redrawn):
    """Phase, curves and speed."""

    def __init__(self, console: Console) -> None:
        self._phase, self._done, self._total = "starting", 0, 0
        self._step: Row = {}
        self._rewards: list[float] = []
        self._dev: list[float] = []
        self._calls = 0
        super().__init__(console, refresh_per_second=8)

    def on_event(self, kind: str, row: Row) -> None:
        if kind == "start":
            self._max_steps = int(row.get("max_steps", 0))
        elif kind == "state":
            self._phase, self._done, self._total = str(row.get("new", "")), 0, 0
        elif kind == "warmup":
            self._phase = f"warm-up, loss {row['loss']:.3f}"
        elif kind == "eval" and row["split"] == "dev":
            self._dev.append(row["accuracy"])
        elif kind == "step":
            self._step = row
            self._rewards.append(max(0.0, row.get("accuracy", 0.0)))
            self._calls += row.get("tool_calls", 0)
            self._left = self._eta.after(int(row["step"]), self._max_steps)
        self.say(event_line(kind, row))

    def on_progress(self, phase: str, done: int, total: int) -> None:
        self._phase, self._done, self._total = phase, done, total

    def _render(self) -> Panel:
        step = int(self._step.get("step", 0))
        seconds = sum(self._step.get("seconds", {}).values())
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right", style="dim")
        grid.add_column()
        grid.add_row("step", f"{step}/{self._max_steps or '?'}   elapsed {clock(time.monotonic() - self._began)}"
                     + (f"   at most {clock(self._left)} left" if self._left is not None else ""))
        grid.add_row("now", f"{self._phase}" + (f" {self._done}/{self._total}" if self._total else ""))
        if self._rewards:
            grid.add_row("sampled correct", f"{sparkline(self._rewards)} {self._rewards[-1]:.1%}")
        if self._dev:
            grid.add_row("dev greedy", f"{sparkline(self._dev)} {self._dev[-1]:.1%}")
        if self._step:
            rate = self._step.get("total_tokens", 0) / seconds if seconds else 0.0
            grid.add_row("kl engine/trainer",
                         f"{self._step.get('kl_k3', 0.0):.1e}   entropy {self._step.get('entropy', 0):.3f}")
            grid.add_row("speed", f"{rate:,.0f} tokens/s   {self._calls} sandbox calls, "
                                  f"{self._step.get('tool_ms', 0):.1f} ms each")
        total = self._total or self._max_steps or 1
        return Panel(Group(grid, ProgressBar(total=total, completed=self._done if self._total else step)),
                     title="tidemill rl", title_align="left", width=min(100, self._console.width))


def make_view(stream: TextIO) -> RichView | PlainView:
    """A panel if `stream` is a terminal, lines otherwise. Use as a context manager."""
    return RichView(Console(file=stream)) if stream.isatty() else PlainView(stream)
