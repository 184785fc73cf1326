"""What the sandbox service can be told at its start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tidemill.core.config import require, strict_config

MAX_SOCKET_PATH = 100
"""Bytes of a unix socket's path; the kernel's limit is 107."""


@strict_config
@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """One service on one state folder.

    state_dir        store, socket, log and everything the backends keep at run time
    cache_dir        runtime binaries and built templates, shared between services
    backend          name of the backend used when a request names none
    heavy_slots      starts, restores and forks at once; 0: one per processor
    max_sandboxes    living sandboxes at most; more are refused
    lease_grace_s    how long sandboxes outlive the owner of their lease
    reap_interval_s  how often expiry and leases are looked at
    history_s        how long dead sandboxes, finished operations and events are remembered
    keep_on_stop     sandboxes go on without the service and are adopted by the next one; else they end with it
    port             loopback TCP port beside the unix socket; 0: none. Requests on it need `api_key`
    """

    state_dir: Path
    cache_dir: Path
    backend: str = "gvisor"
    heavy_slots: int = 0
    max_sandboxes: int = 1024
    lease_grace_s: float = 10.0
    reap_interval_s: float = 1.0
    history_s: float = 24 * 3600.0
    keep_on_stop: bool = True
    port: int = 0
    api_key: str = ""

    def __post_init__(self) -> None:
        require(self.state_dir.is_absolute(), field="state_dir", value=str(self.state_dir), expected="an absolute path")
        require(len(os.fsencode(self.socket)) <= MAX_SOCKET_PATH, field="state_dir", value=str(self.state_dir),
                expected=f"a path short enough for a unix socket ({MAX_SOCKET_PATH} bytes with /daemon.sock)")
        require(self.heavy_slots >= 0, field="heavy_slots", value=self.heavy_slots, expected="0 or more")
        require(self.max_sandboxes >= 1, field="max_sandboxes", value=self.max_sandboxes, expected="at least 1")
        for name in ("lease_grace_s", "history_s"):
            require(getattr(self, name) >= 0, field=name, value=getattr(self, name), expected="0 or more seconds")
        require(self.reap_interval_s > 0, field="reap_interval_s", value=self.reap_interval_s, expected="more than 0")
        require(0 <= self.port <= 65535, field="port", value=self.port, expected="0 to 65535")
        require(not self.port or 32 <= len(self.api_key) <= 256, field="api_key", value="***" if self.api_key else "",
                expected="32 to 256 characters, because TCP is open to every local user")

    @property
    def socket(self) -> Path:
        return self.state_dir / "daemon.sock"

    @property
    def log(self) -> Path:
        return self.state_dir / "daemon.log"

    @property
    def workers(self) -> int:
        """Heavy operations at once."""
        return self.heavy_slots or max(2, os.cpu_count() or 1)
