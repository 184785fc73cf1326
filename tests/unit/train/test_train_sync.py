"""Adapter sync with a real engine: chain, refusals, retry, and canary readings under planted faults."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tidemill.core.errors import TrainError
from tidemill.engine.client import EmbeddedEngine
from tidemill.engine.config import EngineConfig
from tidemill.engine.core import EngineCore
from tidemill.engine.weights import EngineWeights
from tidemill.model import presets
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.lora import LoraConfig
from tidemill.model.peft_files import read_adapter
from tidemill.train.canary import Canary
from tidemill.train.config import CanarySection, RlSection
from tidemill.train.controls import BitFlip, FrozenEngine, ZeroScale
from tidemill.train.samples import Sample
from tidemill.train.sync import AdapterSync, SyncRefusedError, plan_chunks
from tidemill.train.trainer import Trainer

LORA = LoraConfig(rank=2, alpha=4.0)
CANARY = [tuple(range(3, 20)), (5, 4, 3, 2, 1, 0, 90, 91)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> BaseStore:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base")
    write_base(folder, CausalLM(presets.tiny(), seed=1))
    return BaseStore.open(folder)


def engine_for(store: BaseStore) -> EmbeddedEngine:
    config = EngineConfig(max_model_len=64, max_running=4, max_batched_tokens=64)
    return EmbeddedEngine(lambda: EngineCore(EngineWeights(store, name="t"), config))


def step(trainer: Trainer) -> None:
    ids = tuple(range(10, 30))
    mask = (False,) * 10 + (True,) * 10
    trainer.step([Sample(ids, mask, (0.0,) * 20, 1.0), Sample(ids[::-1], mask, (0.0,) * 20, -1.0)])


def sync_for(engine: object, store: BaseStore, folder: Path) -> AdapterSync:
    return AdapterSync(engine, LORA, base_digest=store.digest, folder=folder, chunk_bytes=2000)  # type: ignore[arg-type]


def test_versions_chain_and_unchanged_exports_are_errors(store: BaseStore, tmp_path: Path) -> None:
    async def run() -> None:
        trainer = Trainer(store, LORA, RlSection(tis_cap=0), seed=1, max_sampled=48)
        async with engine_for(store) as engine:
            sync = sync_for(engine, store, tmp_path)
            first = await sync.push(trainer.adapter(), step=0, must_change=False)
            assert (first.version, first.attempts) == (1, 1)
            assert first.largest_chunk <= max(2000, max(x.numel() * 4 for x in trainer.adapter().values()))
            with pytest.raises(TrainError, match="no tensor changed"):
                await sync.push(trainer.adapter(), step=1, must_change=True)
            step(trainer)
            second = await sync.push(trainer.adapter(), step=1, must_change=True)
            assert sync.manifest is not None
            assert (second.version, sync.manifest.previous) == (2, first.manifest_sha256)
            assert 0 < second.changed < second.tensors
            info = await engine.info()
            assert (info.version, info.adapter_digest) == (2, second.manifest_sha256)
            lora, tensors, manifest = read_adapter(tmp_path / "v0002")
            assert (lora, manifest) == (LORA, sync.manifest)
            assert all(torch.equal(x, trainer.adapter()[n]) for n, x in tensors.items())
            again = sync_for(engine, store, tmp_path)
            again.resume_from(2)
            step(trainer)
            assert (await again.push(trainer.adapter(), step=2, must_change=True)).version == 3

    asyncio.run(run())


def test_a_first_adapter_that_is_not_the_identity_is_refused(store: BaseStore, tmp_path: Path) -> None:
    async def run() -> None:
        trainer = Trainer(store, LORA, RlSection(tis_cap=0), seed=1, max_sampled=48)
        step(trainer)
        async with engine_for(store) as engine:
            with pytest.raises(TrainError, match="is not zero"):
                await sync_for(engine, store, tmp_path).push(trainer.adapter(), step=0, must_change=False)
            assert (await engine.info()).version == 0

    asyncio.run(run())


class FlipOnce(BitFlip):
    """Corrupts the first transfer only."""

    async def adapter_chunk(self, index: int, names: Sequence[str], data: bytes) -> None:
        await super().adapter_chunk(index, names, data)

    async def abort_adapter(self) -> None:
        self._version = 0
        await super().abort_adapter()

    async def begin_adapter(self, manifest, config, *, num_chunks):  # type: ignore[no-untyped-def]
        seen = getattr(self, "_seen", False)
        await super().begin_adapter(manifest, config, num_chunks=num_chunks)
        self._version = 0 if seen else 2
        self._seen = True


def test_a_corrupted_transfer_is_repeated_once_then_refused(store: BaseStore, tmp_path: Path) -> None:
    async def run() -> None:
        trainer = Trainer(store, LORA, RlSection(tis_cap=0), seed=1, max_sampled=48)
        async with engine_for(store) as engine:
            flaky = sync_for(FlipOnce(engine), store, tmp_path)
            report = await flaky.push(trainer.adapter(), step=0, must_change=False)
            assert report.attempts == 2
            bad = sync_for(BitFlip(engine), store, tmp_path)
            bad.resume_from(1)
            step(trainer)
            with pytest.raises(SyncRefusedError, match="version 1 stays served"):
                await bad.push(trainer.adapter(), step=1, must_change=True)
            assert (await engine.info()).version == 1
            good = sync_for(engine, store, tmp_path)
            good.resume_from(1)
            assert (await good.push(trainer.adapter(), step=1, must_change=True)).version == 2

    asyncio.run(run())


@pytest.mark.parametrize("fault", [None, FrozenEngine, ZeroScale])
def test_the_canary_fires_where_hashes_see_nothing(store: BaseStore, tmp_path: Path, fault: type | None) -> None:
    async def run() -> list[str]:
        trainer = Trainer(store, LORA, RlSection(tis_cap=0), seed=1, max_sampled=48)
        canary = Canary(CanarySection())
        fired = []
        async with engine_for(store) as engine:
            seen = fault(engine) if fault else engine
            sync = sync_for(seen, store, tmp_path)
            for number in range(4):
                await sync.push(trainer.adapter(), step=number, must_change=number > 0)
                mine = [x.tolist() for x in trainer.score(CANARY)]
                theirs = [list(await seen.score(ids)) for ids in CANARY]
                if number == 0:
                    canary.measure_floor(mine, [theirs, theirs])
                    assert canary.floor < 1e-5
                    assert canary.repeatability == 0
                fired.append(canary.read(sync.version, mine, theirs).fires)
                step(trainer)
        assert canary.stops == bool(fault)
        return fired

    fired = asyncio.run(run())
    assert fired == (["", "co-movement", "co-movement", "co-movement"] if fault else [""] * 4)


def test_chunks_keep_order_and_size() -> None:
    tensors = {str(i): torch.zeros(n) for i, n in enumerate([1, 10, 300, 2, 2, 90])}
    plan = plan_chunks(tensors, max_bytes=400)
    assert [n for chunk in plan for n in chunk] == list(tensors)
    assert plan == [["0", "1"], ["2"], ["3", "4", "5"]]
