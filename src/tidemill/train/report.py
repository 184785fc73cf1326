"""report.html of a run: one file that opens anywhere. Says what was measured, what was stopped early, what was caught.

Everything comes from the run's folder; styles and charts are inline, and there is no script.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tidemill.core.files import write_atomic
from tidemill.train.charts import Series, line_chart, stacked_bars
from tidemill.train.record import Rows, RunRecord
from tidemill.train.run_dir import RunDir

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, control words included (Tokenizer.decode)."""

EPISODES_SHOWN = 3
"""Sample episodes of each of the first and last step and of each evaluation of the test split."""

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:1180px;margin:24px auto;padding:0 16px;color:#1f2328}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 8px;border-bottom:1px solid #d0d7de}
.sub{color:#57606a;margin:0 0 12px}.big{font-size:20px;margin:8px 0}.bad{color:#d1242f}.good{color:#1a7f37}
table{border-collapse:collapse;margin:6px 0}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #eaeef2}
td:first-child,th:first-child{text-align:left}th{font-weight:600;color:#57606a}
.row{display:flex;flex-wrap:wrap;gap:12px}.row svg{width:560px;max-width:100%}
svg text{font:10px system-ui,sans-serif;fill:#57606a}svg .t{font-weight:600;fill:#1f2328}svg .e,svg .k{text-anchor:end}
svg .m{text-anchor:middle}svg .g{stroke:#eaeef2;fill:none}.none{color:#57606a;font-style:italic}
.strip{font:12px/1.9 ui-monospace,monospace;word-break:break-all;margin:2px 0 14px}
.strip span{padding:1px 1px;border-radius:2px}.strip .g{color:#8c959f}.strip .s{outline:1px solid #d0d7de}
pre{background:#f6f8fa;padding:10px;overflow:auto;font-size:12px}code{font-size:12px}
"""


def write_report(run: RunDir, decode: Decode) -> Path:
    """Write report.html (atomically) from what the folder holds now; returns its path."""
    path = run.path / "report.html"
    write_atomic(path, render(RunRecord.load(run), decode).encode())
    return path


def render(record: RunRecord, decode: Decode) -> str:
    """The whole page."""
    title = f"{_e(record.config['name'])} · {_e(record.run.name)}"
    sections = [
        _head(record), _curves(record), _warmup(record), _controls(record), _proof(record), _cost(record),
        _episodes(record, decode), _setting(record),
    ]
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
            f"</head><body>{''.join(sections)}</body></html>\n")


def _head(record: RunRecord) -> str:
    config, summary = record.config, record.summary
    out = [f"<h1>{_e(config['name'])}</h1>",
           f'<p class="sub">run {_e(record.run.name)}, seed {_e(config["seed"])}. {_e(config.get("about", ""))}</p>']
    if summary is None:
        return "".join([*out, '<p class="big bad">This run has not ended; below is what it wrote so far.</p>'])
    rows = [(f"test accuracy {when} RL", f"<b>{_share(summary[f'test_{when}'])}</b> "
             f"[{_interval(summary[f'ci95_{when}'])}], n = {summary['test_n']}") for when in ("before", "after")]
    rows += [
        ("stopped by", _e(summary["stopped_by"])), ("optimizer steps", summary["steps"]),
        ("wall time", f"{_num(summary['wall_s'])} s, of which set-up {_num(summary['setup_s'])} s"),
        ("sandboxes used / left over", f"{summary['sandboxes_used']} / {_zero(summary['sandboxes_left'])}"),
        ("tool calls", summary["tool_calls"]),
        ("infrastructure errors (masked, not rewarded)", summary["infra_errors"]),
        ("kl(engine, trainer) at the first and last step", f"{_num(summary['kl_floor'])} / {_num(summary['kl_last'])}"),
        ("adapter syncs / verified", f"{summary['syncs']} / {summary['syncs_verified']}"),
        ("adapter served at the end", f"<code>{_e(summary['head_digest'])}</code>"),
    ]
    note = ('<p class="sub">Accuracy is greedy. Intervals are Wilson 95 %. Stopping looked at the dev split '
            f"(n = {summary['dev_n']}) only; the test split was evaluated before and after and at no other time.</p>")
    return "".join([*out, _pairs(rows), note])


def _curves(record: RunRecord) -> str:
    steps = record.steps
    x = [row["step"] for row in steps]
    dev = record.evals_of("dev")
    accuracy = Series("dev, greedy", [row["step"] for row in dev], [row["accuracy"] for row in dev],
                      low=[row["lo95"] for row in dev], high=[row["hi95"] for row in dev])
    kl_floor = steps[0].get("kl_k3") if steps else None
    floor = [Series("first step", x, [kl_floor] * len(x), dashed=True)] if kl_floor else []
    charts = [
        line_chart("accuracy on the dev split", [accuracy], y_range=(0, 1)),
        line_chart("sampled reward and share correct", [_series(steps, "reward", "reward"),
                                                        _series(steps, "accuracy", "share correct")]),
        line_chart("kl(engine, trainer), k3, nats per token", [_series(steps, "kl_k3", "k3"), *floor], log_y=True),
        line_chart("entropy of sampled tokens, nats", [_series(steps, "entropy", "entropy")]),
        line_chart("gradient norm", [_series(steps, "grad_norm", "before clipping")], log_y=True),
        line_chart("dynamic sampling: groups per step", [
            _series(steps, "groups", "kept"),
            *(Series(f"dropped: {reason}", x, [row.get("drops", {}).get(reason, 0) for row in steps])
              for reason in _keys(steps, "drops"))]),
        line_chart("share of ratios that were clipped", [_series(steps, "clip_share", "clipped")]),
        line_chart("mean time of a tool call, ms", [_series(steps, "tool_ms", "tool")]),
    ]
    return f'<h2>Learning</h2><div class="row">{"".join(charts)}</div>' + _outcomes(record)


def _outcomes(record: RunRecord) -> str:
    rows = [[f"{row['split']} at step {row['step']}", row["n"], _share(row["accuracy"]),
             _interval((row["lo95"], row["hi95"])), _counts(row.get("outcomes", {}))] for row in record.evals]
    total: dict[str, int] = {}
    for row in record.steps:
        for name, n in row.get("outcomes", {}).items():
            total[name] = total.get(name, 0) + n
    text = f"<p>Training episodes by outcome: {_counts(total)}.</p>" if total else ""
    return text + _table(["evaluation", "n", "accuracy", "95 %", "outcomes"], rows)


def _warmup(record: RunRecord) -> str:
    end = record.last("warmup_end")
    if not end:
        return ""
    rows = record.warmup
    settings = record.config["warmup"]
    stop = (f"It was <b>stopped early on purpose</b> once {_share(end['accuracy'])} of the dev demonstrations were "
            f"what greedy decoding would write (the recipe says {_share(settings['stop_at'])}), so that reinforcement "
            "learning has something to do." if end["stopped_early"] else
            f"It ran to its limit and reached {_share(end['accuracy'])} on dev demonstrations.")
    return (f"<h2>Supervised warm-up</h2><p>{end['steps']} steps over all parameters, experts on the MXFP4 grid, "
            f"{end['tokens']} tokens in {_num(end.get('seconds'))} s. {stop}</p>" + '<div class="row">'
            + line_chart("warm-up loss", [_series(rows, "loss", "loss")], log_y=True)
            + line_chart("dev demonstrations reproduced", [_series(rows, "accuracy", "share")], y_range=(0, 1))
            + "</div>")


def _controls(record: RunRecord) -> str:
    if not record.controls:
        defined = ", ".join(record.config.get("controls", {}))
        return ("<h2>Controls</h2><p>This is a run without a planted fault. The recipe defines these controls: "
                f"{_e(defined or 'none')}; <code>--control NAME</code> runs one.</p>")
    rows = [[_e(c["name"]), _e(c["expect"]), _mark(c["behaved"], "as expected", "NOT as expected"), _e(c["why"])]
            for c in record.controls]
    return "<h2>Controls</h2>" + _table(["control", "must happen", "verdict", "what happened"], rows)


def _proof(record: RunRecord) -> str:
    floor, readings = record.last("floor"), record.canary
    x = [row["version"] for row in readings]
    fired = [row for row in readings if row["fires"]]
    charts = [
        line_chart("canary: movement since the version before, nats per token", [
            Series("trainer", x, [row["trainer_moved"] for row in readings]),
            Series("engine", x, [row["engine_moved"] for row in readings], dashed=True),
        ], x_label="version", log_y=True),
        line_chart("canary: |engine - trainer|, nats per token", [
            Series("mean", x, [row["mean_diff"] for row in readings]),
            Series("threshold", x, [row["threshold"] for row in readings], dashed=True),
        ], x_label="version", log_y=True),
    ]
    said = (f"<p>Floor at version 1: {_num(floor.get('floor'))} nats per token between engine and trainer, "
            f"{_num(floor.get('repeatability'))} between two engine runs; threshold {_num(floor.get('threshold'))}."
            "</p>") if floor else ""
    verdict = (f'<p class="bad">The canary fired {len(fired)} times: '
               + "; ".join(f"v{row['version']} {_e(row['fires'])}" for row in fired[:8]) + "</p>") if fired else (
        '<p class="good">The canary never fired.</p>' if readings else "")
    rows = [[row["version"], row["tensors"], row["changed"], row["nbytes"], row["chunks"], row["largest_chunk"],
             row["attempts"], f"{1000 * row['seconds']:.0f}", f"<code>{_e(row['manifest_sha256'])}</code>"]
            for row in (*record.syncs[:2], *record.syncs[2:][-4:])]
    head = ["version", "tensors", "changed", "bytes", "chunks", "largest", "attempts", "ms", "manifest"]
    drawn = f'<div class="row">{"".join(charts)}</div>'
    return (f"<h2>Proof that the engine serves what was trained</h2>{said}{verdict}{drawn}" + _table(head, rows)
            + f'<p class="sub">First two and last four of {len(record.syncs)} syncs; each manifest names its '
            "predecessor.</p>")


def _cost(record: RunRecord) -> str:
    seconds: dict[str, float] = {}
    for row in record.steps:
        for name, value in row.get("seconds", {}).items():
            seconds[name] = seconds.get(name, 0.0) + value
    sampled, total = (sum(row.get(k, 0) for row in record.steps) for k in ("sampled_tokens", "total_tokens"))
    episodes = sum(row.get("episodes", 0) for row in record.steps)
    text = ""
    if episodes:
        text = (f"<p>{episodes} training episodes, {total / episodes:.1f} tokens each, of which "
                f"{sampled / episodes:.1f} were sampled; {record.steps[-1]['prompts'][1]} prompts, each used once.</p>")
    resumes = record.other.get("resume", [])
    if resumes:
        text += "<p>Resumed " + "; ".join(
            f"from step {row['from_step']} (removed: {_e(', '.join(row.get('removed', [])) or 'nothing')})"
            for row in resumes) + ".</p>"
    bars = stacked_bars("time of all training steps", sorted(seconds.items(), key=lambda kv: -kv[1]), unit="s")
    return f'<h2>Where the time went</h2>{text}<div class="row">{bars}</div>'


def _episodes(record: RunRecord, decode: Decode) -> str:
    out: list[str] = []
    for name in _chosen_files(record.run):
        out += [_episode(name, row, decode) for row in _varied(list(record.run.read_episodes(name)))]
    if not out:
        return ""
    legend = ('<p class="sub">Grey tokens were given (prompt, scaffolding, tool results) and never enter the loss. '
              "Sampled tokens are boxed; the redder, the less probable they were when sampled. Hover for id, log-prob "
              "and version.</p>")
    return f"<h2>Sample episodes</h2>{legend}{''.join(out)}"


def _chosen_files(run: RunDir) -> list[str]:
    names = sorted(p.name.removesuffix(".jsonl.zst") for p in (run.path / "episodes").glob("*.jsonl.zst"))
    steps = [n for n in names if n.startswith("step")]
    return [*dict.fromkeys([*steps[:1], *steps[-1:]]), *(n for n in names if n.startswith("test"))]


def _varied(rows: Rows) -> Rows:
    """One episode of each outcome first, then in order."""
    seen: set[str] = set()
    first: Rows = []
    rest: Rows = []
    for row in rows:
        (rest if row["outcome"] in seen else first).append(row)
        seen.add(row["outcome"])
    return (first + rest)[:EPISODES_SHOWN]


def _episode(name: str, row: Mapping[str, Any], decode: Decode) -> str:
    facts = [f"{name}", f"outcome {row['outcome']}", f"reward {_num(row.get('reward'))}"]
    if row.get("advantage") is not None:
        facts.append(f"advantage {row['advantage']:+.3f}")
    facts += [f"{key.replace('_', ' ')} {row[key]}" for key in ("problem_id", "sandbox_id", "error") if row.get(key)]
    spans: list[str] = []
    for i, (token, sampled) in enumerate(zip(row["ids"], row["sampled"], strict=True)):
        text = _e(decode([token])).replace("\n", "⏎") or "·"
        if not sampled:
            spans.append(f'<span class="g" title="id {token}, given">{text}</span>')
            continue
        logprob = row["logprobs"][i]
        alpha = min(1.0, -logprob / 4)
        spans.append(f'<span class="s" style="background:rgba(209,36,47,{alpha:.2f})" title="id {token}, log-prob '
                     f'{logprob:.3f}, version {row["versions"][i]}">{text}</span>')
    return f'<p><b>{_e(" · ".join(facts))}</b></p><div class="strip">{"".join(spans)}</div>'


def _setting(record: RunRecord) -> str:
    config = yaml.safe_dump(record.config, sort_keys=False)
    return (f"<h2>Setting</h2>{_pairs(sorted((k, _e(v)) for k, v in record.environment.items()))}"
            f"<h2>Data</h2><pre>{_e(yaml.safe_dump(record.data, sort_keys=False))}</pre>"
            f"<h2>Resolved configuration</h2><pre>{_e(config)}</pre>")


def _series(rows: Rows, key: str, name: str) -> Series:
    return Series(name, [row["step"] for row in rows], [row.get(key) for row in rows])


def _keys(rows: Rows, key: str) -> list[str]:
    return sorted({name for row in rows for name in row.get(key, {})})


def _pairs(rows: Iterable[tuple[str, object]]) -> str:
    return "<table>" + "".join(f"<tr><td>{_e(k)}</td><td>{v}</td></tr>" for k, v in rows) + "</table>"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Cells are HTML already; an empty table is left out."""
    if not rows:
        return ""
    top = "".join(f"<th>{_e(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{_e(name)} {n}" for name, n in sorted(counts.items())) or "none"


def _mark(ok: bool, yes: str, no: str) -> str:
    return f'<span class="{"good" if ok else "bad"}">{yes if ok else no}</span>'


def _zero(n: int) -> str:
    return _mark(n == 0, str(n), str(n))


def _share(x: float | None) -> str:
    return "-" if x is None else f"{x:.1%}"


def _interval(bounds: Sequence[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.1%} to {bounds[1]:.1%}"


def _num(x: float | None) -> str:
    if x is None or not math.isfinite(x):
        return "-"
    return f"{x:.1f}" if abs(x) >= 10 else f"{x:.3g}"


def _e(x: object) -> str:
    return html.escape(str(x), quote=True)
