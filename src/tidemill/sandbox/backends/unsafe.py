"""Guests in namespaces on this machine's own kernel: for code that is trusted, and machines without gVisor.

The same agent is the first process of new mount, process, network, IPC and host-name namespaces; its
system is the template with a layer in memory above. That keeps programs from tripping over each other,
not an attacker in: they share the host's kernel, and a command that asks for root has enough rights to
get out. Guests can be paused where the kernel's freezer can be used; they cannot be saved or forked. They
live on beside the service.

    unsafe/guests/NAME/    in.fifo, out.fifo, mnt/ (empty outside the guest); `paused` while frozen
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.core.digests import PREFIX, digest_bytes
from tidemill.core.errors import (
    DeadlineError,
    MissingCapabilityError,
    SandboxDiedError,
    SandboxError,
    SetupError,
    TidemillError,
)
from tidemill.core.sandbox_api import Capabilities
from tidemill.sandbox.backends.base import Guest
from tidemill.sandbox.backends.channel import Channel
from tidemill.sandbox.backends.freezer import Freezer, find_freezer
from tidemill.sandbox.backends.guest import AgentGuest, GuestLimits
from tidemill.sandbox.backends.pipes import make_pipes, open_guest_ends, open_host_ends
from tidemill.sandbox.backends.processes import end_processes, find_processes
from tidemill.sandbox.guest.binary import agent_binary, zygote_script
from tidemill.sandbox.template import built_templates, find_template

HELLO_S = 30.0
START_S = 30.0
FREEZE_S = 10.0
END_S = 20.0
PAUSED_PROBE_S = 0.05
TMPFS_BYTES = 1 << 30
UNSAFE_LIMITS = GuestLimits(nproc=4096)
"""The kernel counts processes per user over the whole machine, so all guests share this number."""


class UnsafeGuest(AgentGuest):
    """One set of namespaces."""

    def __init__(self, backend: UnsafeBackend, runtime_id: str, template: str, channel: Channel) -> None:
        super().__init__(runtime_id, channel, limits=UNSAFE_LIMITS)
        self._backend = backend
        self._template = template
        self._paused_at = 0.0

    def record(self) -> Mapping[str, Any]:
        return {"runtime_id": self._runtime_id, "template": self._template, "identity": self.channel.identity.hex()}

    @property
    def _mark(self) -> Path:
        return self._backend.folder(self._runtime_id) / "paused"

    async def hello(self) -> None:
        if not self._paused:
            await super().hello()
        elif not self._backend.first_processes(self._runtime_id):
            raise SandboxDiedError(f"{self.channel.label} is gone.")

    async def pause(self) -> None:
        self.check_alive()
        now = time.monotonic()
        self._mark.write_text(repr(now))
        try:
            await self._backend.freezer().freeze(self._runtime_id, timeout_s=FREEZE_S)
        except BaseException:
            self._mark.unlink(missing_ok=True)
            raise
        self._paused, self._paused_at = True, now

    async def resume(self) -> None:
        self.check_alive()
        # Read by the agent before it looks at any deadline.
        self.channel.shift_deadlines(max(0.0, time.monotonic() - self._paused_at))
        self._backend.freezer().thaw(self._runtime_id)
        self._paused = False
        self._mark.unlink(missing_ok=True)

    async def greet_again(self, *, frozen: bool) -> None:
        """After attaching. A frozen guest reads the greeting when it goes on."""
        timeout_s = PAUSED_PROBE_S if frozen else HELLO_S
        try:
            await self.channel.hello(abandon=True, takeover=True, timeout_s=timeout_s)
        except DeadlineError:
            if not frozen:
                raise
            try:
                self._paused_at = float(self._mark.read_text())
            except (OSError, ValueError):
                self._paused_at = time.monotonic()
            self._paused = True

    async def fork(self, runtime_ids: Sequence[str]) -> Sequence[Guest | TidemillError]:
        raise MissingCapabilityError("the unsafe backend cannot fork a sandbox.", remedy="Use the backend gvisor.")

    async def kill(self) -> None:
        self.channel.close()
        await self._backend.destroy(self._runtime_id)


class UnsafeBackend:
    """Backend over namespaces. One per state folder and event loop."""

    def __init__(self, *, state_dir: Path, cache_dir: Path) -> None:
        self._home = state_dir / "unsafe"
        self._cache_dir = cache_dir
        self._guests: set[UnsafeGuest] = set()
        key = digest_bytes(str(self._home.absolute()).encode()).removeprefix(PREFIX)[:12]
        self._freezer = find_freezer(f"tidemill-{key}")

    @property
    def name(self) -> str:
        return "unsafe"

    def folder(self, runtime_id: str) -> Path:
        """Everything of one guest."""
        return self._home / "guests" / runtime_id

    def freezer(self) -> Freezer:
        """Raises MissingCapabilityError if this machine has none we may use."""
        if self._freezer is None:
            raise MissingCapabilityError(
                "guests of the unsafe backend cannot be paused here: no control-group freezer is mounted writable.",
                remedy="Use the backend gvisor.",
            )
        return self._freezer

    def capabilities(self) -> Capabilities:
        detail = {"network": "none", "freezer": f"cgroup v{self._freezer.version}" if self._freezer else "none"}
        return Capabilities(
            backend="unsafe",
            isolation="weak",
            pause=self._freezer is not None,
            snapshot=False,
            fork=False,
            cow_memory=False,
            external_tcp=False,
            survives_daemon=True,
            detail=detail,
        )

    async def start(self) -> None:
        if os.geteuid() != 0:
            raise SetupError("the unsafe backend needs root.", remedy="Run the sandbox service as root.")
        (self._home / "guests").mkdir(parents=True, exist_ok=True, mode=0o700)
        await asyncio.to_thread(agent_binary, self._cache_dir)

    async def templates(self) -> Sequence[str]:
        return built_templates(self._cache_dir)

    async def create(self, runtime_id: str, template: str) -> UnsafeGuest:
        rootfs = find_template(self._cache_dir, template).rootfs
        if set(str(rootfs)) & set(",:\\"):
            raise SetupError(
                f"{rootfs} holds a comma, colon or backslash, which overlayfs cannot take.",
                remedy="Set TIDEMILL_CACHE to another folder.",
            )
        folder = self.folder(runtime_id)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError as e:
            raise SandboxError(f"{runtime_id} exists.") from e
        starting = asyncio.ensure_future(self._launch(runtime_id, rootfs))
        try:
            channel = await asyncio.shield(starting)
            await channel.hello(timeout_s=HELLO_S)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._abandon(runtime_id, starting)))
            raise
        guest = UnsafeGuest(self, runtime_id, template, channel)
        self._guests.add(guest)
        return guest

    async def attach(self, record: Mapping[str, Any]) -> UnsafeGuest:
        runtime_id = str(record["runtime_id"])
        if not self.first_processes(runtime_id):
            raise SandboxDiedError(f"{runtime_id} is gone.")
        channel = Channel(
            *open_host_ends(self.folder(runtime_id)), label=runtime_id, identity=bytes.fromhex(record["identity"])
        )
        guest = UnsafeGuest(self, runtime_id, record["template"], channel)
        try:
            await guest.greet_again(frozen=self._freezer is not None and self._freezer.frozen(runtime_id))
        except BaseException:
            channel.close()
            raise
        self._guests.add(guest)
        return guest

    async def destroy(self, runtime_id: str) -> None:
        for guest in [g for g in self._guests if g.runtime_id == runtime_id]:
            self._guests.discard(guest)
            guest.channel.close()
        folder = str(self.folder(runtime_id))

        def belongs(arguments: list[str]) -> bool:
            return folder in arguments and ("--label" in arguments or "--contain" in arguments)

        # One in the middle of starting may become two while we look: look again until there is none. The kernel ends
        # every process of the namespace before the first one is gone.
        deadline = time.monotonic() + END_S
        while pids := find_processes(belongs):
            if (left := deadline - time.monotonic()) <= 0:
                raise SandboxError(f"{runtime_id} still has {len(pids)} processes after {END_S:g} s of killing them.")
            ending = asyncio.ensure_future(end_processes(pids, belongs, timeout_s=left))
            await asyncio.sleep(0)
            if self._freezer is not None and self._freezer.frozen(runtime_id):
                # Frozen processes do not die.
                self._freezer.thaw(runtime_id)
            await ending
        if self._freezer is not None:
            await self._freezer.remove(runtime_id, timeout_s=max(1.0, deadline - time.monotonic()))
        shutil.rmtree(folder, ignore_errors=True)

    async def reap(self, keep: Collection[str]) -> Sequence[str]:
        guests = self._home / "guests"
        there = {path.name for path in guests.iterdir()} if guests.is_dir() else set()
        if self._freezer is not None:
            there |= self._freezer.names()
        gone = sorted(there - set(keep))
        for runtime_id in gone:
            await self.destroy(runtime_id)
        return gone

    async def close(self) -> None:
        for guest in self._guests:
            await guest.detach()
        self._guests.clear()

    def first_processes(self, runtime_id: str) -> list[int]:
        """The guest's first process as the host counts it; empty if it is gone."""
        folder = str(self.folder(runtime_id))
        return find_processes(lambda arguments: "--label" in arguments and folder in arguments)

    # ---- inside

    async def _abandon(self, runtime_id: str, starting: asyncio.Future[Channel]) -> None:
        """Undo a start that failed or is not wanted any more. It is let come to its end first: a process that is just
        becoming another program cannot be recognised."""
        await asyncio.wait([starting])
        if not starting.cancelled() and starting.exception() is None:
            starting.result().close()
        await self.destroy(runtime_id)

    async def _launch(self, runtime_id: str, rootfs: Path) -> Channel:
        folder = self.folder(runtime_id)
        members = str(self._freezer.members_file(runtime_id)) if self._freezer is not None else "-"
        command = [
            str(agent_binary(self._cache_dir)),
            "--contain",
            str(rootfs),
            str(folder),
            str(zygote_script()),
            str(TMPFS_BYTES),
            members,
        ]
        (folder / "mnt").mkdir()
        make_pipes(folder)
        if self._freezer is not None:
            self._freezer.make(runtime_id)
        stdin, stdout = open_guest_ends(folder)
        ends: tuple[int, int] | None = None
        try:
            ends = open_host_ends(folder)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=stdout, stderr=asyncio.subprocess.PIPE, start_new_session=True
            )
            try:
                async with asyncio.timeout(START_S):
                    _, said = await process.communicate()
            except TimeoutError as e:
                raise DeadlineError(f"{runtime_id} did not start within {START_S:g} s.") from e
            finally:
                if process.returncode is None:
                    process.kill()
                    await asyncio.shield(process.wait())
            if process.returncode:
                raise SandboxError(f"{runtime_id} cannot be started: {said.decode('utf-8', 'replace').strip()}")
            channel = Channel(*ends, label=runtime_id, identity=secrets.token_bytes(16))
            ends = None
            return channel
        finally:
            for fd in (stdin, stdout, *(ends or ())):
                os.close(fd)
