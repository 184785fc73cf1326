"""`make bench [ONLY=NAME]`: run the suites in benchmarks/bench_*.py and write benchmarks/results/NAME.json."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(only: str | None) -> int:
    sys.path.insert(0, str(HERE))
    names = sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*.py"))
    if only and only not in names:
        print(f"no benchmark named {only!r}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    for name in [only] if only else names:
        importlib.import_module(f"bench_{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
