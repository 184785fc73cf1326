"""`tidemill doctor`: what this machine can do, proven in under a minute without any trained weights.

Each line is green, or says what to do. Exit code 1 if a line is red.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import typer
from rich.console import Console

from tidemill.core.config import Environment, read_environment
from tidemill.core.engine_api import Completion, GenerateRequest, SamplingParams
from tidemill.core.errors import IntegrityError, TidemillError
from tidemill.core.launcher import start_time
from tidemill.core.manifest import AdapterManifest
from tidemill.engine.client import EmbeddedEngine
from tidemill.engine.config import EngineConfig
from tidemill.engine.core import EngineCore
from tidemill.engine.memory.limits import available_memory
from tidemill.engine.weights import EngineWeights
from tidemill.kernels import kda, mxfp4
from tidemill.kernels.linear import linear
from tidemill.model import presets
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.lora import LoraConfig, attach, build_manifest, export_adapter
from tidemill.model.tensor_bytes import tensor_bytes
from tidemill.sandbox.client import LocalSandboxClient
from tidemill.sandbox.runtime import find_runtime
from tidemill.sandbox.starting import ensure_daemon
from tidemill.sandbox.template import find_template


@dataclass(frozen=True)
class Line:
    """One finding. status: ok, note (works, but read it) or bad."""

    name: str
    status: str
    detail: str
    seconds: float = 0.0


class BadFinding(Exception):  # noqa: N818 - it carries a remedy, not a failure of this program
    """A check found something wrong; the text is the remedy."""


class Note(Exception):  # noqa: N818 - as above
    """A check passed with something the user should know."""


def doctor(as_json: bool = typer.Option(False, "--json", help="Print findings as JSON."),
           sandboxes: bool = typer.Option(True, help="Also start and fork a sandbox (needs root).")) -> None:
    """Check this machine: kernels, numerics contract, formats, sandboxes. Green, or a remedy per line."""
    torch.set_num_threads(1)
    console = Console(stderr=True, highlight=False)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("machine", _machine),
        ("memory limit", _memory),
        ("linear: alone = in a batch, by bits", _linear),
        ("KDA: chunk = recurrence", _kda),
        ("MXFP4: round trip", _mxfp4),
        ("engine: cached = recomputed, alone = in a batch, by bits", _engine),
        ("adapter: one flipped bit is refused", _adapter),
    ]
    environment = read_environment()
    if environment.e2b_api_url:
        checks.append(("sandboxes", lambda: f"used from {environment.e2b_api_url} (E2B_API_URL)"))
    elif sandboxes:
        checks.append(("sandbox: runtime", lambda: _runtime(environment)))
        checks.append(("sandbox: a live interpreter survives a fork", lambda: _fork(environment)))
    lines: list[Line] = []
    for name, check in checks:
        with console.status(name):
            lines.append(_run(name, check))
        if not as_json:
            line = lines[-1]
            mark = {"ok": "[green]ok  [/]", "note": "[yellow]note[/]", "bad": "[red]BAD [/]"}[line.status]
            Console(highlight=False).print(f"{mark} {line.name}: {line.detail} [dim]({line.seconds:.1f} s)[/]")
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    if any(line.status == "bad" for line in lines):
        raise typer.Exit(1)


def _run(name: str, check: Callable[[], str]) -> Line:
    started = time.monotonic()
    try:
        status, detail = "ok", check()
    except Note as e:
        status, detail = "note", str(e)
    except BadFinding as e:
        status, detail = "bad", str(e)
    except TidemillError as e:
        status, detail = "bad", str(e)
    return Line(name, status, detail, round(time.monotonic() - started, 2))


def _machine() -> str:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    isa = next((name for name in ("avx512f", "avx2") if name in flags), platform.machine())
    return f"{os.cpu_count()} cores, {isa}, Python {platform.python_version()}, torch {torch.__version__}, kernels: ref"


def _memory() -> str:
    free, source = available_memory()
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    detail = f"{free / 2**30:.1f} GiB for pools ({source}), {disk / 2**30:.0f} GiB on the temporary disk"
    if free < 2**30 or disk < 2**30:
        raise BadFinding(f"{detail}: free at least 1 GiB of each")
    return detail


def _linear() -> str:
    """Cancelling data: the exact product is 0, so what remains is rounding, which shows every change of order."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 192), (96, 64), (257, 16), (1000, 33)]
    compared = 0
    for inner, outer in shapes:
        half = torch.randn(257, inner // 2, generator=generator)
        w_half = torch.randn(outer, inner // 2, generator=generator)
        columns = torch.randperm(2 * (inner // 2), generator=generator)
        x = torch.cat([half, -half], 1)[:, columns].contiguous()
        w = torch.cat([w_half, w_half], 1)[:, columns].contiguous()
        alone = torch.cat([linear(x[i : i + 1], w) for i in range(x.shape[0])])
        for rows in (1, 7, 8, 64, 257):
            if not torch.equal(linear(x[:rows].contiguous(), w), alone[:rows]):
                raise BadFinding(f"a row of a {inner} x {outer} product depends on its {rows} neighbours: this torch "
                                 "build breaks the numerics contract; install the version in constraints.txt")
            compared += rows
    return f"{compared} rows compared over {len(shapes)} shapes"


def _kda() -> str:
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for low, high in ((-5.0, -1e-3), (-5.0, -4.999), (-1e-6, 0.0)):
        shape = (2, 77, 2, 32)
        q, k = kda.qk_norm(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        v = torch.randn(shape, generator=generator)
        g = low + (high - low) * torch.rand(shape, generator=generator)
        beta = torch.rand(shape[:3], generator=generator)
        o1, s1 = kda.recurrence(q, k, v, g, beta)
        o2, s2 = kda.chunk(q, k, v, g, beta)
        worst = max(worst, float((o1 - o2).abs().max()), float((s1 - s2).abs().max()))
    if not worst <= 1e-5:
        raise BadFinding(f"chunked and recurrent KDA differ by {worst:.1e} (bound 1e-5)")
    return f"largest difference {worst:.1e} at gates from 0 to -5 (bound 1e-5)"


def _mxfp4() -> str:
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    once = mxfp4.decode(*mxfp4.encode(w))
    if not torch.equal(mxfp4.decode(*mxfp4.encode(once)), once):
        raise BadFinding("re-encoding decoded weights changed their values")
    return f"values survive re-encoding; relative error of encoding {float((once - w).norm() / w.norm()):.3f}"


def _engine() -> str:
    with tempfile.TemporaryDirectory() as folder:
        write_base(Path(folder), CausalLM(presets.tiny(), seed=3))
        return asyncio.run(_engine_contract(BaseStore.open(Path(folder))))


async def _engine_contract(store: BaseStore) -> str:
    config = EngineConfig(max_model_len=256, max_running=8, max_batched_tokens=64, prefill_chunk=16)
    generator = torch.Generator().manual_seed(4)
    prompts = [tuple(torch.randint(0, 96, (n,), generator=generator).tolist()) for n in (5, 70, 23, 131, 1, 64)]
    async with EmbeddedEngine(lambda: EngineCore(EngineWeights(store, name="doctor"), config)) as engine:
        def ask(i: int, run: str) -> GenerateRequest:
            params = SamplingParams(max_tokens=6, temperature=1.0, seed=9, sequence=i)
            return GenerateRequest(request_id=f"{run}-{i}", ids=prompts[i], sampling=params, prompt_logprobs=True)

        alone = [await engine.generate(ask(i, "alone")) for i in range(len(prompts))]
        batch = await asyncio.gather(*(engine.generate(ask(i, "batch")) for i in range(len(prompts))))
        await engine.open_session("s")
        first = await engine.generate(GenerateRequest(
            request_id="s1", ids=prompts[3][:50], sampling=SamplingParams(max_tokens=0), session_id="s"))
        cached = await engine.generate(GenerateRequest(
            request_id="s2", ids=prompts[3][50:], sampling=ask(3, "x").sampling, session_id="s"))
        if first.ids or cached.cached_tokens < 49:  # the last given token is computed with what follows it
            raise BadFinding(f"the session kept {cached.cached_tokens} of 50 tokens")
    for i, (a, b) in enumerate(zip(alone, batch, strict=True)):
        if _figures(a) != _figures(b):
            raise BadFinding(f"sequence {i} has other bits in a batch than alone: the contract does not hold here")
    if (alone[3].ids, alone[3].logprobs) != (cached.ids, cached.logprobs):
        raise BadFinding("continuing from cached state gives other bits than recomputing")
    return f"{len(prompts)} sequences of 1 to 131 tokens, sampled at temperature 1"


def _figures(c: Completion) -> tuple[object, ...]:
    return c.ids, c.logprobs, c.model_logprobs, c.prompt_logprobs


def _adapter() -> str:
    with tempfile.TemporaryDirectory() as folder:
        model = CausalLM(presets.tiny(), seed=3)
        write_base(Path(folder), model)
        store = BaseStore.open(Path(folder))
        lora = LoraConfig(rank=2, alpha=4)
        attach(model, lora)
        tensors = export_adapter(model, lora)
        manifest = build_manifest(tensors, version=1, base_digest=store.digest, config_digest=lora.digest,
                                  created_step=0)
        data = bytearray(b"".join(tensor_bytes(x) for x in tensors.values()))
        return asyncio.run(_send_adapter(store, lora, manifest, list(tensors), data))


async def _send_adapter(store: BaseStore, lora: LoraConfig, manifest: AdapterManifest, names: list[str],
                        data: bytearray) -> str:
    config = EngineConfig(max_model_len=64, max_running=2, max_batched_tokens=16)
    async with EmbeddedEngine(lambda: EngineCore(EngineWeights(store, name="doctor"), config)) as engine:
        flipped = bytearray(data)
        flipped[len(flipped) // 2] ^= 1
        await engine.begin_adapter(manifest, lora.to_adapter_config(), num_chunks=1)
        try:
            await engine.adapter_chunk(0, names, bytes(flipped))
        except IntegrityError:
            await engine.abort_adapter()
        else:
            raise BadFinding("the engine accepted an adapter with a flipped bit")
        await engine.begin_adapter(manifest, lora.to_adapter_config(), num_chunks=1)
        await engine.adapter_chunk(0, names, bytes(data))
        digest = await engine.commit_adapter(1)
    if digest != manifest.manifest_sha256:
        raise BadFinding("the engine's manifest digest differs from the exported one")
    return f"{manifest.count} tensors verified by SHA-256, {digest[:19]}…"


def _runtime(environment: Environment) -> str:
    if os.geteuid() != 0:
        raise BadFinding("not root: start as root, or set E2B_API_URL to use a sandbox service elsewhere")
    runtime = find_runtime(environment.cache_dir)
    template = find_template(environment.cache_dir)
    made = datetime.strptime(str(runtime.version), "%Y%m%d").replace(tzinfo=UTC)
    age = (datetime.now(UTC) - made).days
    detail = f"runsc {runtime.version} at {runtime.path}, template {template.name} ready"
    if age > 365:
        raise Note(f"{detail}; it is {age // 365} years old: for hostile code put a newer runsc on PATH")
    return detail


def _fork(environment: Environment) -> str:
    with tempfile.TemporaryDirectory(prefix="tidemill-doctor-") as folder:
        return asyncio.run(_fork_in(Path(folder), environment))


async def _fork_in(state: Path, environment: Environment) -> str:
    """A service of its own in a temporary state folder, so that no running one is touched."""
    health = await ensure_daemon(state, cache_dir=environment.cache_dir, options=("--on-stop", "kill"))
    client = LocalSandboxClient(state)
    try:
        parent = await client.create(lease="doctor")
        session = await parent.open_session("python")
        await session.run("x = 40")
        children = await parent.fork(2)
        seen: list[str] = []
        for number, child in enumerate(children, 1):
            inherited = await client.handle(child.sandbox_id).sessions()
            seen.append((await inherited[0].run(f"x += {number}; x")).text.strip() or
                        (await inherited[0].run("x")).text.strip())
        kept = (await session.run("x")).text.strip()
        await client.release_lease("doctor")
        left = len(await client.list())
    finally:
        await client.close()
        _end(int(health["pid"]))
    if seen != ["41", "42"] or kept != "40" or left:
        raise BadFinding(f"two forks of x = 40 gave {seen}, the parent {kept}, {left} sandboxes were left; "
                         "run `tidemill sandbox setup` again and look at its messages")
    return "two forks went on from x = 40 to 41 and 42, the parent kept 40, nothing was left"


def _end(pid: int) -> None:
    """Stop the service this program started and wait until it is gone."""
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
