"""report.html: self-contained, well formed, escaped, and true to the run's lineage."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folder import write_run

from tidemill.train.charts import Series, line_chart, stacked_bars, ticks
from tidemill.train.record import RunRecord
from tidemill.train.report import write_report
from tidemill.train.run_dir import RunDir

VOID = {"meta", "br", "path", "circle", "rect", "polygon"}


class Page(HTMLParser):
    """Checks nesting and collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [f"{tag}.{k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "data")]
        if tag in ("script", "link", "iframe", "img", "object", "embed"):
            self.fetched.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(run: RunDir) -> tuple[str, Page]:
    source = write_report(run, lambda ids: "".join(f"<{i}>" for i in ids)).read_text()
    page = Page()
    page.feed(source)
    page.close()
    assert page.open == []
    return source, page


def test_nothing_is_fetched_and_everything_is_escaped(tmp_path: Path) -> None:
    source, page = read(write_run(tmp_path))
    assert page.fetched == []
    assert "url(" not in source
    assert "@import" not in source
    assert "a <b>bold</b> claim & more" in page.text
    for text in ("<2>", "p<1>", "sandbox died & went", "it <did> not"):
        assert text in page.text


def test_it_says_what_was_measured_and_what_was_done_on_purpose(tmp_path: Path) -> None:
    _, page = read(write_run(tmp_path))
    for text in ("94.5%", "93.0% to 96.0%", "n = 1024", "stopped early on purpose", "Wilson", "removed: engine (pid 7)",
                 "The canary fired 1 times: v3 level", "NOT as expected", "sha256:003", "24 prompts, each used once",
                 "Training episodes by outcome: infra_error 3, ok 120, wrong 69"):
        assert text in page.text, text


def test_work_that_was_done_again_counts_once(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path))
    assert [row["step"] for row in record.steps] == [1, 2, 3]
    assert [row["entropy"] for row in record.steps] == [0.4, 0.4, 0.4]
    assert [row["step"] for row in record.evals_of("dev")] == [0]
    assert [row["version"] for row in record.syncs] == [1, 2, 3]


@pytest.mark.parametrize("when", ["unfinished", "fresh"])
def test_a_run_that_has_not_ended_has_a_report_too(tmp_path: Path, when: str) -> None:
    if when == "unfinished":
        run = write_run(tmp_path, finished=False)
    else:
        run = RunDir.open(write_run(tmp_path).path)
        for name in ("events.jsonl", "canary.jsonl", "summary.json", "controls/bit-flip.json"):
            (run.path / name).unlink()
    _, page = read(run)
    assert "This run has not ended" in page.text


def test_charts_keep_gaps_and_scale() -> None:
    chart = line_chart("t", [Series("a", [0, 1, 2, 3], [0.0, None, 1.0, float("nan")], low=[0] * 4, high=[1] * 4)],
                       y_range=(0, 1))
    assert chart.count("M") >= 2
    assert "polygon" in chart
    assert "nan" not in chart
    assert "no data" in line_chart("t", [Series("a", [0], [None])])
    assert "no data" in line_chart("t", [Series("a", [0, 1], [0.0, -1.0])], log_y=True)
    log = line_chart("t", [Series("a", [0, 1, 2], [1e-6, 1e-4, 1e-2])], log_y=True)
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", re.findall(r'<path d="(M[^H"]+)" fill', log)[0])]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert "no data" in stacked_bars("t", [("a", 0.0)], unit="s")
    assert "(75%)" in stacked_bars("t", [("a", 3.0), ("b", 1.0)], unit="s")


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(3, 3) == [3]
    for low, high in ((0, 7), (-3.3, 12), (1e-7, 9e-7), (0, 100)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 7
        assert all(low - 1e-12 <= t <= high + 1e-12 for t in found)
