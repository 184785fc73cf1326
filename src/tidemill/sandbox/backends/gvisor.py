"""Guests under gVisor (systrap): strong isolation, whole-state fork, and a life of their own beside the
service.

A guest is one container whose first process is our agent, spoken to over two named pipes. `create` restores
the template's image: a guest that was booted once, with the interpreter warm, and saved. `fork` saves the
running guest and restores the image under every new name. Layout of the state folder:

    gvisor/run/            the runtime's own records and control sockets
    gvisor/guests/NAME/    config.json, in.fifo, out.fifo, runsc.log; `paused` while frozen
    gvisor/images/         images of forks in progress
Template images lie in the cache folder (snapshots/), keyed by everything they depend on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.core.digests import digest_file
from tidemill.core.errors import DeadlineError, SandboxDiedError, SandboxError, SetupError, TidemillError
from tidemill.core.sandbox_api import Capabilities
from tidemill.sandbox.backends.base import Guest
from tidemill.sandbox.backends.channel import Channel
from tidemill.sandbox.backends.guest import AgentGuest, GuestLimits
from tidemill.sandbox.backends.oci import BundleSpec, bundle_config
from tidemill.sandbox.backends.pipes import make_pipes, open_guest_ends, open_host_ends
from tidemill.sandbox.backends.runsc import Runsc
from tidemill.sandbox.guest.binary import agent_binary, zygote_script
from tidemill.sandbox.runtime import Runtime, find_runtime
from tidemill.sandbox.snapshots.images import ImageStore
from tidemill.sandbox.template import Template, built_templates, find_template

log = logging.getLogger(__name__)

HELLO_S = 30.0
PAUSED_PROBE_S = 0.5
"""How long a guest that may be frozen is given to answer."""
TMPFS_BYTES = 1 << 30
IMAGE_FORMAT = 1
"""Raised when images saved before cannot be used any more for a reason no other part of their key shows."""


class GvisorGuest(AgentGuest):
    """One container."""

    def __init__(
        self, backend: GvisorBackend, runtime_id: str, template: str, channel: Channel, *, generation: int
    ) -> None:
        super().__init__(runtime_id, channel, limits=backend.limits, generation=generation)
        self._backend = backend
        self._template = template
        self._paused_at = 0.0

    def record(self) -> Mapping[str, Any]:
        return {
            "runtime_id": self._runtime_id,
            "template": self._template,
            "generation": self.generation,
            "identity": self.channel.identity.hex(),
        }

    @property
    def _mark(self) -> Path:
        return self._backend.folder(self._runtime_id) / "paused"

    async def hello(self) -> None:
        if not self._paused:
            await super().hello()
        elif not self._backend.runsc.alive(self._runtime_id):
            raise SandboxDiedError(f"{self.channel.label} is gone.")

    async def pause(self) -> None:
        self.check_alive()
        # The mark is there before and after the time it is about, so whoever finds none knows that the guest
        # runs.
        now = time.monotonic()
        self._mark.write_text(repr(now))
        try:
            await self._backend.runsc.pause(self._runtime_id)
        except SandboxError:
            self._mark.unlink(missing_ok=True)
            raise
        self._paused, self._paused_at = True, now

    async def resume(self) -> None:
        self.check_alive()
        # Read by the agent before it looks at any deadline.
        self.channel.shift_deadlines(max(0.0, time.monotonic() - self._paused_at))
        await self._backend.runsc.resume(self._runtime_id)
        self._paused = False
        self._mark.unlink(missing_ok=True)

    async def probe_paused(self) -> None:
        """After attaching: find out whether it is frozen. Raises SandboxDiedError, SandboxError."""
        try:
            since = float(self._mark.read_text())
        except (OSError, ValueError):
            await self.channel.hello(
                generation=self.generation, abandon=True, takeover=True, timeout_s=HELLO_S
            )
            return
        try:
            await self.channel.hello(
                generation=self.generation, abandon=True, takeover=True, timeout_s=PAUSED_PROBE_S
            )
            self._mark.unlink(missing_ok=True)
        except DeadlineError:
            # Our greeting waits in the pipe and is read when it resumes.
            self._paused, self._paused_at = True, since

    async def fork(self, runtime_ids: Sequence[str]) -> Sequence[Guest | TidemillError]:
        self.check_alive()
        return await self._backend.copy(self, self._template, runtime_ids)

    async def save(self, image: Path) -> None:
        """Save into an empty folder and go on. Not broken off by a cancellation: the runtime finishes a save
        anyway."""
        started = time.monotonic()
        saving: asyncio.Future[None] | None = None
        try:
            await self.channel.quiesce()
            saving = asyncio.ensure_future(self._backend.runsc.save(self._runtime_id, image))
            await asyncio.shield(saving)
        finally:
            if saving is not None and not saving.done():
                await asyncio.wait([saving])
            if not self.channel.closed:
                self.channel.proceed()
                self.channel.frozen_s += time.monotonic() - started

    async def kill(self) -> None:
        self.channel.close()
        await self._backend.destroy(self._runtime_id)


class GvisorBackend:
    """Backend over runsc. One per state folder and event loop."""

    def __init__(self, *, state_dir: Path, cache_dir: Path, limits: GuestLimits | None = None) -> None:
        self.limits = limits or GuestLimits()
        self._home = state_dir / "gvisor"
        self._cache_dir = cache_dir
        self._images = ImageStore(cache_dir / "snapshots")
        self._restores = asyncio.Semaphore(max(2, 2 * (os.cpu_count() or 1)))
        self._guests: set[GvisorGuest] = set()
        self._runtime: Runtime | None = None
        self._runsc: Runsc | None = None
        self._agent = Path()
        self._digests: dict[str, str] = {}
        self._building = asyncio.Lock()
        self._rebuilt = False

    @property
    def name(self) -> str:
        return "gvisor"

    @property
    def runsc(self) -> Runsc:
        """The runtime; SetupError before `start`."""
        if self._runsc is None:
            raise SetupError("the gvisor backend has not been started.")
        return self._runsc

    def folder(self, runtime_id: str) -> Path:
        """Everything of one guest but the runtime's own records."""
        return self._home / "guests" / runtime_id

    def capabilities(self) -> Capabilities:
        detail = {"platform": "systrap", "network": "none"}
        if self._runtime is not None:
            detail |= {
                "runtime": str(self._runtime.path),
                "version": str(self._runtime.version),
                "notes": self._runtime.notes,
            }
        return Capabilities(
            backend="gvisor",
            isolation="strong",
            pause=True,
            snapshot=True,
            fork=True,
            cow_memory=False,
            external_tcp=False,
            survives_daemon=True,
            detail=detail,
        )

    async def start(self) -> None:
        if os.geteuid() != 0:
            raise SetupError(
                "the gvisor backend needs root.",
                remedy="Run the sandbox service as root, or set E2B_API_URL.",
            )
        self._runtime = await asyncio.to_thread(find_runtime, self._cache_dir)
        for part in ("run", "guests", "images"):
            (self._home / part).mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in (self._home / "images").iterdir():
            shutil.rmtree(left, ignore_errors=True)
        self._runsc = Runsc(self._runtime, self._home / "run", self._home / "guests")
        self._agent = await asyncio.to_thread(agent_binary, self._cache_dir)
        parts = (("agent", self._agent), ("zygote", zygote_script()), ("runtime", self._runtime.path))
        self._digests = {name: await asyncio.to_thread(digest_file, path) for name, path in parts}
        for name in await self.templates():
            await self._template_image(find_template(self._cache_dir, name))

    async def templates(self) -> Sequence[str]:
        return built_templates(self._cache_dir)

    async def create(self, runtime_id: str, template: str) -> GvisorGuest:
        found = find_template(self._cache_dir, template)
        image = await self._template_image(found)
        self._check_free(runtime_id)
        try:
            return await self._start(runtime_id, found, image, generation=0)
        except DeadlineError:
            raise
        except SandboxError as e:
            if self._rebuilt:
                raise
            self._rebuilt = True
            log.warning(
                "the saved template %s cannot be restored (%s): it is saved anew", template, e.message
            )
            await self.destroy(runtime_id)
            self._images.remove(template, self._image_key(found))
            return await self._start(runtime_id, found, await self._template_image(found), generation=0)

    async def attach(self, record: Mapping[str, Any]) -> GvisorGuest:
        runtime_id = str(record["runtime_id"])
        if not self.runsc.alive(runtime_id):
            raise SandboxDiedError(f"{runtime_id} is gone.")
        channel = Channel(
            *open_host_ends(self.folder(runtime_id)),
            label=runtime_id,
            identity=bytes.fromhex(record["identity"]),
        )
        guest = GvisorGuest(self, runtime_id, record["template"], channel, generation=record["generation"])
        try:
            await guest.probe_paused()
        except BaseException:
            channel.close()
            raise
        self._guests.add(guest)
        return guest

    async def destroy(self, runtime_id: str) -> None:
        for guest in [g for g in self._guests if g.runtime_id == runtime_id]:
            self._guests.discard(guest)
            guest.channel.close()
        await self.runsc.end(runtime_id)
        shutil.rmtree(self.folder(runtime_id), ignore_errors=True)

    async def reap(self, keep: Collection[str]) -> Sequence[str]:
        there = self.runsc.containers() | {path.name for path in (self._home / "guests").iterdir()}
        gone = sorted(there - set(keep))
        for runtime_id in gone:
            await self.destroy(runtime_id)
        return gone

    async def close(self) -> None:
        for guest in self._guests:
            await guest.detach()
        self._guests.clear()

    async def copy(
        self, source: GvisorGuest, template: str, runtime_ids: Sequence[str]
    ) -> list[Guest | TidemillError]:
        """Save `source` and restore the image under every name."""
        found = find_template(self._cache_dir, template)
        image = Path(tempfile.mkdtemp(dir=self._home / "images", prefix="fork-"))
        try:
            await source.save(image)
            copies = [
                asyncio.ensure_future(self._start(name, found, image, generation=source.generation + 1))
                for name in runtime_ids
            ]
            try:
                done = await asyncio.gather(*copies, return_exceptions=True)
            except BaseException:
                for copy in copies:
                    copy.cancel()
                for guest in await asyncio.gather(*copies, return_exceptions=True):
                    if isinstance(guest, GvisorGuest):
                        await guest.kill()
                raise
        finally:
            shutil.rmtree(image, ignore_errors=True)
        for result in done:
            if isinstance(result, BaseException) and not isinstance(result, TidemillError):
                raise result
        return [r for r in done if isinstance(r, (GvisorGuest, TidemillError))]

    # ---- inside

    def _check_free(self, runtime_id: str) -> None:
        if self.folder(runtime_id).exists():
            raise SandboxError(f"{runtime_id} exists.")

    async def _start(
        self, runtime_id: str, template: Template, image: Path | None, *, generation: int
    ) -> GvisorGuest:
        """A new container from an image, or booted if there is none. Leaves nothing on failure."""
        self._check_free(runtime_id)
        folder = self.folder(runtime_id)
        folder.mkdir(mode=0o700)
        try:
            (folder / "config.json").write_text(json.dumps(self._config(template)))
            make_pipes(folder)
            channel = await self._launch(runtime_id, image)
            try:
                await channel.hello(generation=generation, timeout_s=HELLO_S)
            except BaseException:
                channel.close()
                raise
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self.destroy(runtime_id)))
            raise
        guest = GvisorGuest(self, runtime_id, template.name, channel, generation=generation)
        self._guests.add(guest)
        return guest

    async def _launch(self, runtime_id: str, image: Path | None) -> Channel:
        """Start the container; its ends of the pipes are closed here when the runtime has passed them on."""
        stdin, stdout = open_guest_ends(self.folder(runtime_id))
        ends: tuple[int, ...] = ()
        try:
            ends = open_host_ends(self.folder(runtime_id))
            async with self._restores:
                if image is None:
                    await self.runsc.start(runtime_id, stdin, stdout)
                else:
                    await self.runsc.restore(runtime_id, image, stdin, stdout)
            return Channel(*ends, label=runtime_id, identity=secrets.token_bytes(16))
        except BaseException:
            for fd in ends:
                os.close(fd)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)

    def _config(self, template: Template) -> dict[str, Any]:
        return bundle_config(
            BundleSpec(
                rootfs=template.rootfs, agent=self._agent, zygote=zygote_script(), tmpfs_bytes=TMPFS_BYTES
            )
        )

    def _image_key(self, template: Template) -> dict[str, Any]:
        return {
            "format": IMAGE_FORMAT,
            "template": template.digest,
            "config": self._config(template),
            "flags": self.runsc.flags(),
            **self._digests,
        }

    async def _template_image(self, template: Template) -> Path:
        """The template's saved guest, made on first use."""
        key = self._image_key(template)
        if (image := self._images.find(template.name, key)) is not None:
            return image
        async with self._building, self._images.exclusive():
            if (image := self._images.find(template.name, key)) is None:
                await self._save_template(template, key)
        return self._images.path(template.name, key)

    async def _save_template(self, template: Template, key: dict[str, Any]) -> None:
        started = time.monotonic()
        runtime_id = f"template-{secrets.token_hex(4)}"
        async with self._images.building(template.name, key) as image:
            guest = await self._start(runtime_id, template, None, generation=0)
            try:
                await guest.save(image)
            finally:
                await guest.kill()
        log.info(
            "saved template %s in %.1f s: %s",
            template.name,
            time.monotonic() - started,
            json.dumps({p.name: p.stat().st_size for p in self._images.path(template.name, key).iterdir()}),
        )
