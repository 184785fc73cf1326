"""Line charts and bars as inline SVG, for a report that must open anywhere without scripts, fonts or a network."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

COLOURS = ("#1f6feb", "#d1242f", "#2da44e", "#9a6700", "#8250df", "#57606a")
_WIDTH, _HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 14, 30


@dataclass(frozen=True, slots=True)
class Series:
    """One line. Points whose y is None or not finite are gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())
    """With `low`: an interval per point, drawn as a band."""


def line_chart(title: str, series: Sequence[Series], *, x_label: str = "step", log_y: bool = False,
               y_range: tuple[float, float] | None = None) -> str:
    """An <svg> element; a sentence instead if there is no finite point."""
    values = [y for s in series for y in (*s.y, *s.low, *s.high)
              if y is not None and math.isfinite(y) and (not log_y or y > 0)]
    xs = [x for s in series for x in s.x]
    if not values or not xs:
        return f'<p class="none">{html.escape(title)}: no data.</p>'
    low, high = y_range or _widen(min(values), max(values), log_y)
    frame = _Frame(min(xs), max(xs), low, high, log_y)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title, quote=True)}">',
             f'<text x="{_LEFT}" y="10" class="t">{html.escape(title)}</text>', *frame.grid(x_label)]
    for i, s in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        if s.low and s.high:
            parts.append(frame.band(s, colour))
        parts += frame.line(s, colour)
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_TOP + 12 + 13 * i}" class="k" fill="{colour}">'
                     f"{html.escape(s.name)}</text>")
    return "".join([*parts, "</svg>"])


def _widen(low: float, high: float, log_y: bool) -> tuple[float, float]:
    if log_y:
        return low / 1.5, high * 1.5
    pad = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


class _Frame:
    """Maps values to pixels."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float, log_y: bool) -> None:
        self.x0, self.x1, self.y0, self.y1, self.log_y = x0, x1 if x1 > x0 else x0 + 1, y0, y1, log_y

    def px(self, x: float) -> float:
        return _LEFT + (x - self.x0) / (self.x1 - self.x0) * (_WIDTH - _LEFT - _RIGHT)

    def py(self, y: float) -> float:
        if self.log_y:
            share = (math.log(max(y, self.y0)) - math.log(self.y0)) / (math.log(self.y1) - math.log(self.y0))
        else:
            share = (y - self.y0) / (self.y1 - self.y0)
        return _HEIGHT - _BOTTOM - min(1.0, max(0.0, share)) * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self, x_label: str) -> list[str]:
        out: list[str] = []
        for y in _log_ticks(self.y0, self.y1) if self.log_y else ticks(self.y0, self.y1):
            p = self.py(y)
            out.append(f'<path d="M{_LEFT} {p:.1f}H{_WIDTH - _RIGHT}" class="g"/>'
                       f'<text x="{_LEFT - 5}" y="{p + 3:.1f}" class="e">{y:.3g}</text>')
        out += [f'<text x="{self.px(x):.1f}" y="{_HEIGHT - _BOTTOM + 13}" class="m">{x:g}</text>'
                for x in ticks(self.x0, self.x1)]
        out.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" class="e">{html.escape(x_label)}</text>')
        return out

    def line(self, s: Series, colour: str) -> list[str]:
        path, pen, count, last = "", "M", 0, (0.0, 0.0)
        for x, y in zip(s.x, s.y, strict=True):
            if y is None or not math.isfinite(y) or (self.log_y and y <= 0):
                pen = "M"
                continue
            last = self.px(x), self.py(y)
            path += f"{pen}{last[0]:.1f} {last[1]:.1f}"
            pen, count = "L", count + 1
        dash = ' stroke-dasharray="4 3"' if s.dashed else ""
        out = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'] if count > 1 else []
        if count:
            out.append(f'<circle cx="{last[0]:.1f}" cy="{last[1]:.1f}" r="2.2" fill="{colour}"/>')
        return out

    def band(self, s: Series, colour: str) -> str:
        upper = [f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in zip(s.x, s.high, strict=True)]
        lower = [f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in zip(s.x, s.low, strict=True)]
        return f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{colour}" opacity="0.12"/>'


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """About `count` round numbers within [low, high]."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [10.0**p for p in powers] or [low, high]


def stacked_bars(title: str, parts: Sequence[tuple[str, float]], *, unit: str) -> str:
    """One horizontal bar cut into labelled parts; parts of zero length are left out."""
    shown = [(name, value) for name, value in parts if value > 0]
    total = sum(value for _, value in shown)
    if not total:
        return f'<p class="none">{html.escape(title)}: no data.</p>'
    size = f"0 0 {_WIDTH} {44 + 14 * len(shown)}"
    out = [f'<svg viewBox="{size}" role="img" aria-label="{html.escape(title, quote=True)}">',
           f'<text x="0" y="10" class="t">{html.escape(title)}</text>']
    x = 0.0
    for i, (name, value) in enumerate(shown):
        width, colour = value / total * _WIDTH, COLOURS[i % len(COLOURS)]
        out.append(f'<rect x="{x:.1f}" y="18" width="{width:.1f}" height="14" fill="{colour}"/>'
                   f'<text x="0" y="{46 + 14 * i}" class="l" fill="{colour}">{html.escape(name)} {value:.1f} {unit} '
                   f"({value / total:.0%})</text>")
        x += width
    return "".join([*out, "</svg>"])
