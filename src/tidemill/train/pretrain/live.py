"""What a person sees on stderr while a training goes on: a live panel on a terminal, lines elsewhere.

A listener of tidemill.train.metrics; it changes nothing and never raises because a field is missing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from tidemill.train.live import Lines, Redrawn, clock

Row = Mapping[str, Any]

LINE_S = 10.0
"""Seconds between lines about steps."""


def update_line(row: Row, max_steps: int, eta_s: float | None) -> str:
    """One step in one line."""
    left = f"  about {duration(eta_s)} left" if eta_s is not None else ""
    return (f"step {row['step']:>5}/{max_steps}  loss {row['loss']:.4f}  grad {row['grad_norm']:.2f}  "
            f"lr {row['lr']:.2e}  {row['tokens'] / 1e6:.2f} M tokens  {row['tokens_per_s']:,.0f} tok/s{left}")


def event_line(kind: str, row: Row) -> str | None:
    """Any other event in one line, or None if it is not worth one."""
    if kind == "start":
        return f"{row['recipe']}: seed {row['seed']}, {row['max_steps']} steps"
    if kind == "resume":
        return f"resumed from step {row['from_step']}"
    if kind == "held_out":
        bits = f"  {row['bits_per_byte']:.3f} bits per byte" if row.get("bits_per_byte") is not None else ""
        return f"held out at step {row['step']}: {row['source']:<20} loss {row['loss']:.4f}{bits}"
    if kind == "checkpoint":
        return f"checkpoint at step {row['step']} ({row['nbytes'] / 2**20:.0f} MiB, {row['seconds']:.1f} s)"
    if kind == "stop":
        return f"stopped by {row['stopped_by']} after step {row['step']}"
    return None


def duration(seconds: float) -> str:
    """`3:07`, `5 h 12 min` or `2 d 3 h`."""
    if seconds < 3600:
        return clock(seconds)
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


class LineView(Lines):
    """One line per event, and one about steps now and then."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._shown = float("-inf")

    def on_event(self, kind: str, row: Row) -> None:
        line = event_line(kind, row)
        if kind == "start":
            self._max_steps = int(row["max_steps"])
        if kind == "update":
            left, now = self._eta.after(int(row["step"]), self._max_steps), time.monotonic()
            if now - self._shown >= LINE_S or row["step"] == self._max_steps:
                self._shown = now
                line = update_line(row, self._max_steps, left)
        self.say(line)


class PanelView(Redrawn):
    """Steps, loss and what is held out."""

    def __init__(self, console: Console) -> None:
        self._row: Row = {}
        self._held_out: dict[str, Row] = {}
        super().__init__(console, refresh_per_second=4)

    def on_event(self, kind: str, row: Row) -> None:
        if kind == "start":
            self._max_steps = int(row["max_steps"])
        elif kind == "held_out":
            self._held_out[str(row["source"])] = row
        elif kind == "update":
            self._row = row
            self._left = self._eta.after(int(row["step"]), self._max_steps)
        self.say(event_line(kind, row))

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """The panel shows steps."""

    def _render(self) -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right", style="dim")
        grid.add_column()
        left = f"   about {duration(self._left)} left" if self._left is not None else ""
        step = int(self._row.get("step", 0))
        elapsed = duration(time.monotonic() - self._began)
        grid.add_row("step", f"{step}/{self._max_steps or '?'}   elapsed {elapsed}{left}")
        if self._row:
            grid.add_row("loss", f"{self._row['loss']:.4f}   gradient {self._row['grad_norm']:.2f}   learning rate "
                                 f"{self._row['lr']:.2e}")
            grid.add_row("speed", f"{self._row['tokens_per_s']:,.0f} tokens/s, {self._row['tokens'] / 1e6:.2f} M done")
        for name, row in self._held_out.items():
            bits = f"   {row['bits_per_byte']:.3f} bits per byte" if row.get("bits_per_byte") is not None else ""
            grid.add_row(name, f"{row['loss']:.4f} nats per token{bits}")
        return Panel(Group(grid, ProgressBar(total=self._max_steps or 1, completed=step)), title="tidemill train",
                     title_align="left", width=min(100, self._console.width))


def make_view(stream: TextIO) -> PanelView | LineView:
    """A panel if `stream` is a terminal, lines otherwise. Use as a context manager."""
    return PanelView(Console(file=stream)) if stream.isatty() else LineView(stream)
