"""One service from start to stop: lock, store, backends, recovery, reaper, HTTP, and everything given back in
reverse.

The process around it (arguments, signals, going into the background) is tidemill.sandbox.daemon.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from tidemill.core.errors import SetupError
from tidemill.core.launcher import start_time
from tidemill.sandbox.api.app import build_app
from tidemill.sandbox.backends.base import Backend
from tidemill.sandbox.config import ServiceConfig
from tidemill.sandbox.orchestrator import Orchestrator
from tidemill.sandbox.reaper import Reaper
from tidemill.sandbox.recovery import recover
from tidemill.sandbox.store import StateLock, Store

log = logging.getLogger(__name__)

SETTLE_S = 20.0
"""How long a stopping service waits for requests and operations in progress."""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: the process around the service decides when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def running_service(config: ServiceConfig, backends: Sequence[Backend]) -> AsyncIterator[Orchestrator]:
    """A service that listens and answers inside the block.

    Raises BusyError if another service holds the state folder, SetupError if the folder or a socket cannot be used.
    """
    _make_folder(config.state_dir)
    async with AsyncExitStack() as stack:
        stack.enter_context(StateLock(config.state_dir))
        store = Store(config.state_dir / "store.sqlite")
        stack.callback(store.close)
        store.begin_daemon(os.getpid(), start_time(os.getpid()) or 0)
        orchestrator = Orchestrator(config, store, {})
        for backend in backends:
            stack.push_async_callback(backend.close)
            await orchestrator.add_backend(backend)
        await recover(orchestrator)
        stack.push_async_callback(_wind_down, orchestrator)
        reaper = asyncio.create_task(Reaper(orchestrator).run())
        stack.push_async_callback(_cancelled, reaper)
        await stack.enter_async_context(_serving(build_app(orchestrator), _unix_socket(config.socket)))
        stack.callback(config.socket.unlink, missing_ok=True)
        if config.port:
            app = build_app(orchestrator, api_key=config.api_key)
            await stack.enter_async_context(_serving(app, _tcp_socket(config.port)))
        log.info("listening on %s%s", config.socket, f" and 127.0.0.1:{config.port}" if config.port else "")
        try:
            yield orchestrator
        finally:
            orchestrator.stopping = True


async def _wind_down(orchestrator: Orchestrator) -> None:
    """Let operations end, then keep or kill the sandboxes by policy, let go of them, and say so in the store."""
    await orchestrator.settle(SETTLE_S)
    rows = orchestrator.rows()
    if not orchestrator.config.keep_on_stop:
        ended = await orchestrator.kill_many(rows, reason="the service was stopped")
        log.info("ended %d of %d sandboxes", ended, len(rows))
    else:
        log.info("leaving %d sandboxes running", len(rows))
    for entry in list(orchestrator.entries.values()):
        if entry.guest is not None:
            await entry.guest.detach()
    orchestrator.store.end_daemon()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def _serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", proxy_headers=False, server_header=False,
        timeout_keep_alive=120, timeout_graceful_shutdown=int(SETTLE_S), backlog=2048)
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if task.done():
                task.result()
                raise SetupError("the HTTP server ended before it listened.")
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        await task
        listener.close()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise SetupError(f"cannot make the state folder {folder}: {e.strerror}",
                         remedy="Choose a folder you may write to (TIDEMILL_STATE).") from e


def _unix_socket(path: Path) -> socket.socket:
    """Listening socket of mode 0600. A file left by a dead service is replaced: we hold the lock."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as e:
        listener.close()
        raise SetupError(f"cannot listen on {path}: {e.strerror}") from e
    finally:
        os.umask(mask)
    return listener


def _tcp_socket(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as e:
        listener.close()
        raise SetupError(f"cannot listen on 127.0.0.1:{port}: {e.strerror}", remedy="Choose another port.") from e
    return listener
