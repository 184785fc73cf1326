"""The sandbox service as a process: `python -m tidemill.sandbox.daemon --state DIR`.

SIGTERM and SIGINT stop it in order. With --detach it goes into the background and the command returns once it
answers (or has failed, with its message on stderr), its log going to daemon.log in the state folder. Exit
codes: 0 stopped or started, 2 wrong arguments or missing set-up, 3 another service holds the state folder.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tidemill.core.config import read_environment
from tidemill.core.errors import BusyError, TidemillError
from tidemill.sandbox.backends.base import Backend
from tidemill.sandbox.backends.registry import NAMES, make_backend
from tidemill.sandbox.config import ServiceConfig
from tidemill.sandbox.service import running_service

EXIT_SETUP, EXIT_BUSY = 2, 3


async def serve(config: ServiceConfig, backends: Sequence[Backend], *, ready: int | None = None) -> None:
    """Run the service until SIGTERM or SIGINT. `ready` is a descriptor that gets one byte once it answers."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_service(config, backends):
        if ready is not None:
            os.write(ready, b"+")
            os.close(ready)
        await stop.wait()
        logging.getLogger(__name__).info("stopping")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    env = read_environment()
    parser = argparse.ArgumentParser(prog="tidemill.sandbox.daemon", description="The sandbox service as a process.")
    parser.add_argument("--state", type=Path, default=env.state_dir, help="state folder (TIDEMILL_STATE)")
    parser.add_argument("--cache", type=Path, default=env.cache_dir, help="runtimes and templates (TIDEMILL_CACHE)")
    parser.add_argument("--backend", default="gvisor", help=f"default backend: {', '.join(NAMES)}")
    parser.add_argument("--on-stop", choices=("keep", "kill"), default="keep", help="what happens to sandboxes")
    parser.add_argument("--workers", type=int, default=0, help="heavy operations at once (0: processors)")
    parser.add_argument("--max-sandboxes", type=int, default=1024)
    parser.add_argument("--lease-grace", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--port", type=int, default=0, help="loopback TCP port beside the unix socket")
    parser.add_argument("--api-key-file", type=Path, help="file with the key that TCP requests must carry")
    parser.add_argument("--detach", action="store_true", help="go into the background once it answers")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _arguments(argv)
    ready: int | None = None
    try:
        config = ServiceConfig(
            state_dir=args.state.absolute(), cache_dir=args.cache.absolute(), backend=args.backend,
            heavy_slots=args.workers, max_sandboxes=args.max_sandboxes, lease_grace_s=args.lease_grace,
            keep_on_stop=args.on_stop == "keep",
            port=args.port, api_key=args.api_key_file.read_text().strip() if args.api_key_file else "")
        make_backend(args.backend, state_dir=config.state_dir, cache_dir=config.cache_dir)
        if args.detach:
            config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            ready, code = _detach(config.log)
            if ready is None:
                return code
        logging.basicConfig(level=logging.INFO, stream=sys.stderr,
                            format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        backends = [make_backend(name, state_dir=config.state_dir, cache_dir=config.cache_dir) for name in NAMES]
        asyncio.run(serve(config, backends, ready=ready))
    except (TidemillError, OSError) as e:
        message = f"error: {e}"
        print(message, file=sys.stderr, flush=True)  # noqa: T201
        if ready is not None:
            os.write(ready, message.encode())
        return EXIT_BUSY if isinstance(e, BusyError) else EXIT_SETUP
    return 0


def _detach(log: Path) -> tuple[int | None, int]:
    """Fork. In the child: a session of its own, output to `log`; returns the descriptor on which to report.
    In the parent: waits for the report, prints what went wrong, and returns the exit code."""
    receive, report = os.pipe()
    child = os.fork()
    if child:
        os.close(report)
        with os.fdopen(receive, "rb") as pipe:
            said = pipe.read().decode("utf-8", "replace")
        if said == "+":
            return None, 0
        _, status = os.waitpid(child, 0)
        print(said or f"error: the sandbox service ended at once; see {log}", file=sys.stderr, flush=True)  # noqa: T201
        return None, os.waitstatus_to_exitcode(status) or EXIT_SETUP
    os.close(receive)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    return report, 0


if __name__ == "__main__":
    sys.exit(main())
