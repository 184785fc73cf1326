"""`tidemill serve`: an engine process and OpenAI's HTTP API in front of it."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.cli.model_source import model_folder, parse_pool_bytes
from tidemill.core.config import parse_config
from tidemill.core.engine_api import EngineInfo
from tidemill.core.errors import SetupError
from tidemill.core.launcher import LocalLauncher
from tidemill.engine.config import PAGE_SIZE, EngineConfig, format_bytes
from tidemill.engine.load import EngineSpec
from tidemill.engine.process import SpawnedEngine

_BACKLOG = 2048


def serve(
    model: Annotated[str, typer.Argument(help="Folder of a model, or a preset with --random-init.")],
    host: Annotated[str, typer.Option(help="Address to listen on. There is no authentication.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    name: Annotated[str, typer.Option(help="Name clients use; default: the folder's name.")] = "",
    adapter: Annotated[Path | None, typer.Option(help="Adapter folder; clients then ask for NAME:ADAPTER.")] = None,
    max_model_len: Annotated[int, typer.Option(help="Longest sequence in tokens.")] = 4096,
    max_running: Annotated[int, typer.Option(help="Requests computed together.")] = 64,
    max_batched_tokens: Annotated[int, typer.Option(help="Rows of one forward.")] = 2048,
    pool_bytes: Annotated[str, typer.Option(help="Memory for states and pages: auto, or e.g. 2GiB.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engine; answers do not depend on it.")] = 1,
    random_init: Annotated[bool, typer.Option("--random-init", help="Serve a preset with random weights.")] = False,
) -> None:
    """Serve a model on http://HOST:PORT/v1 until interrupted."""
    sizes = {"max_model_len": max_model_len, "max_running": max_running, "max_batched_tokens": max_batched_tokens,
             "pool_bytes": parse_pool_bytes(pool_bytes)}
    config = parse_config(EngineConfig, sizes, source="tidemill serve")
    # An orderly end for whoever stops us with a signal, so that the engine and temporary folders go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with _listen(host, port) as sock, model_folder(model, random_init=random_init) as folder:
        spec = EngineSpec(model=folder, adapter=adapter, name=name, threads=threads, config=config)
        _run(spec, sock)


def _run(spec: EngineSpec, sock: socket.socket) -> None:
    import uvicorn

    from tidemill.engine.server import create_app
    from tidemill.model.chat import load_tokenizer

    tokenizer = load_tokenizer(spec.model)
    launcher = LocalLauncher()
    try:
        engine = SpawnedEngine(spec, launcher)
        try:
            info = engine.started_as
            served = f"{info.model}:{spec.adapter.name}" if spec.adapter else info.model
            app = create_app(engine, tokenizer, info=info, models=(served,))
            host, port = sock.getsockname()[:2]
            print(f"{served}: {_sizes(info)}", file=sys.stderr)
            print(f"listening on http://{host}:{port}/v1 (Ctrl-C stops)", file=sys.stderr, flush=True)
            config: Any = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
            uvicorn.Server(config).run(sockets=[sock])
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
        finally:
            engine.shutdown()
    finally:
        launcher.stop_all()


def _listen(host: str, port: int) -> socket.socket:
    """The socket to serve on, taken before anything expensive starts."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise SetupError(f"--host {host!r}: {e.strerror}") from e
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as e:
        sock.close()
        raise SetupError(f"cannot listen on {host}:{port}: {e.strerror}", remedy="Choose another --port.") from e
    return sock


def _sizes(info: EngineInfo) -> str:
    """The sizing arithmetic."""
    slot, page = int(info.stats["slot_bytes"]), int(info.stats["page_bytes"])
    return (f"{info.num_slots} state slots x {format_bytes(slot)} + {info.num_pages} pages x {format_bytes(page)} = "
            f"{format_bytes(int(info.stats['pool_bytes']))}; {info.num_pages * PAGE_SIZE} tokens in pages, at most "
            f"{info.max_running} requests at once of up to {info.max_model_len} tokens")
