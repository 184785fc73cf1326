"""Which real backends this machine can run; shared by the contract suites."""

from __future__ import annotations

import asyncio
import tempfile
from functools import cache
from pathlib import Path

from tidemill.core.config import read_environment
from tidemill.core.errors import SetupError
from tidemill.sandbox.backends.registry import make_backend


@cache
def unavailable(backend: str) -> str:
    """Why this machine cannot run the backend, or empty."""

    async def start(folder: Path) -> None:
        made = make_backend(backend, state_dir=folder, cache_dir=read_environment().cache_dir)
        await made.start()
        await made.close()

    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as folder:
        try:
            asyncio.run(start(Path(folder)))
        except SetupError as e:
            return str(e)
    return ""
