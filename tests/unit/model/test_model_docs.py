"""What the documents promise about tests is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_test_the_table_of_known_bugs_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/known-bugs.md").read_text(encoding="utf-8")))
    assert len(named) > 15
    written = {name for path in (ROOT / "tests").rglob("test_*.py")
               for name in re.findall(r"^\s*def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)}
    assert not named - written
