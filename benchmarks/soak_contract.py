"""The engine's contract at full count: `make soak ONLY=contract`.

Runs the tests marked `soak` of tests/unit/engine/test_engine_contract.py - 2,000 random scenarios, and two threads -
and writes benchmarks/soak/contract.json.
"""

from __future__ import annotations

import subprocess
import sys
import time

from harness import ROOT, conclude, write_soak

EXAMPLES = 2000


def main() -> None:
    """Run, write, print, exit."""
    started = time.time()
    argv = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "soak", "-p", "no:xdist",
            "tests/unit/engine/test_engine_contract.py"]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stdout)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    met = done.returncode == 0
    path = write_soak("contract", EXAMPLES, {"tests": last, "met": met}, started=started)
    conclude(f"contract: {last}", path, met=met)
