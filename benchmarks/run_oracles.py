"""`make oracles [ONLY=NAME]`: run the suites in benchmarks/oracle_*.py and write their tables to docs/oracles.md.

Each suite is a process of its own and leaves benchmarks/oracles/NAME.json; the table is made from all of them, so that
one suite can be run again alone. Exit code 1 if a row of a suite that ran is missed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness import commit
from oracles import COMMIT, table

HERE = Path(__file__).resolve().parent


def main(only: str | None) -> int:
    names = sorted(p.stem.removeprefix("oracle_") for p in HERE.glob("oracle_*.py"))
    if only and only not in names:
        print(f"no oracle named {only!r}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    environment = os.environ | {COMMIT: commit()}
    missed: list[str] = []
    for name in [only] if only else names:
        command = [sys.executable, str(HERE / f"oracle_{name}.py")]
        if subprocess.run(command, check=False, env=environment).returncode:
            missed.append(name)
    results = [json.loads(path.read_text()) for path in sorted((HERE / "oracles").glob("*.json"))]
    (HERE.parent / "docs/oracles.md").write_text(table(results))
    print(f"docs/oracles.md: {sum(len(r['rows']) for r in results)} rows; "
          f"{'missed: ' + ', '.join(missed) if missed else 'all met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
