"""A service over the fake backend, in this process."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tidemill.sandbox.backends.fake import FakeBackend, FakeMachine
from tidemill.sandbox.client import LocalSandboxClient
from tidemill.sandbox.config import ServiceConfig
from tidemill.sandbox.orchestrator import Orchestrator
from tidemill.sandbox.service import running_service

sys.path.insert(0, str(Path(__file__).parent))  # for agent_process

FakeService = Callable[..., AbstractAsyncContextManager[tuple[LocalSandboxClient, Orchestrator]]]


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Short enough for a unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


@pytest.fixture
def fake_service(state_dir: Path, machine: FakeMachine) -> FakeService:
    """`async with fake_service(**config) as (client, orchestrator)`; successive services share the machine."""

    @asynccontextmanager
    async def service(**config: Any) -> AsyncIterator[tuple[LocalSandboxClient, Orchestrator]]:
        settings = ServiceConfig(state_dir=state_dir, cache_dir=state_dir, backend="fake", **config)
        async with running_service(settings, [FakeBackend(machine)]) as orchestrator:
            client = LocalSandboxClient(state_dir)
            try:
                yield client, orchestrator
            finally:
                await client.close()

    return service
