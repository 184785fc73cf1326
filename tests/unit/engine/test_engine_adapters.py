"""Adapter sync: what is served after it, every refusal, and how much memory it takes beside its two slots."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tidemill.core.engine_api import FinishReason
from tidemill.core.errors import (
    BusyError,
    CapacityError,
    IntegrityError,
    ManifestError,
    StaleVersionError,
    TidemillError,
)
from tidemill.core.manifest import AdapterManifest
from tidemill.engine import EngineSpec, load_core
from tidemill.engine import messages as m
from tidemill.model.peft_files import write_adapter
from tidemill.model.tensor_bytes import tensor_entry

PROMPT = list(range(40))


def test_versions_go_up_and_tokens_carry_them(driver, adapter):
    engine = driver()
    one, two = adapter(engine, seed=1), adapter(engine, seed=2)
    base = engine.generate(PROMPT)
    digests = [engine.sync(one, 1), engine.sync(two, 5)]
    assert digests == [one.manifest(engine.store.digest, 1).manifest_sha256,
                       two.manifest(engine.store.digest, 5).manifest_sha256]
    done = engine.generate(PROMPT)
    assert done.versions == (5,) * 8
    assert done.logprobs != base.logprobs
    assert (engine.core.info().version, engine.core.info().adapter_digest) == (5, digests[1])


def test_a_commit_flushes_sessions_and_running_requests_recompute(driver, adapter):
    engine = driver()
    made = adapter(engine, seed=1)
    engine.call(m.OpenSession, "s")
    engine.generate(PROMPT, session="s", max_tokens=4)
    call = engine.start(PROMPT, name="running", max_tokens=30)
    for _ in range(8):
        engine.step()
    manifest = made.manifest(engine.store.digest, 1)
    engine.post(m.BeginAdapter, manifest.to_json(), made.lora.to_adapter_config(), len(made.chunks()))
    for index, names in enumerate(made.chunks()):
        engine.post(m.AdapterChunk, index, tuple(names), made.data(names))
    engine.post(m.CommitAdapter, 1)
    engine.run()
    done = engine.result(call)
    assert done.finish_reason is FinishReason.LENGTH
    assert set(done.versions) == {0, 1}
    assert list(done.versions) == sorted(done.versions)
    first_new = done.versions.index(1)
    fresh = engine.generate([*PROMPT, *done.ids[:first_new]], max_tokens=30 - first_new)
    assert fresh.ids == done.ids[first_new:]
    assert fresh.logprobs == done.logprobs[first_new:]
    assert engine.generate([1], session="s", max_tokens=1).cached_tokens == 0


def test_an_adapter_of_zeros_changes_nothing_and_other_dtypes_and_targets_work(driver, adapter):
    expected = driver("toy").generate(PROMPT).logprobs
    for options in ({"targets": ("attn_out",)}, {"targets": ("experts", "dense"), "rank": 20},
                    {"dtype": "bfloat16", "rank": 1}):
        engine = driver("toy")
        made = adapter(engine, seed=3, **options)
        engine.sync(made, 1)
        assert engine.generate(PROMPT).logprobs != expected
        zeros = driver("toy")
        for name, x in made.tensors.items():
            if "lora_B" in name:
                x.zero_()
        zeros.sync(made, 1)
        assert zeros.generate(PROMPT).logprobs == expected


class Sync:
    """A sync against a store, step by step, with something changed."""

    def __init__(self, engine, made) -> None:
        self.engine, self.made = engine, made
        self.manifest = made.manifest(engine.store.digest, 2)
        self.config = made.lora.to_adapter_config()
        self.num_chunks = len(made.chunks())

    def begin(self) -> None:
        self.engine.call(m.BeginAdapter, self.manifest.to_json(), self.config, self.num_chunks)

    def chunk(self, index: int, names=None, data=None) -> None:
        names = self.made.chunks()[index] if names is None else names
        data = self.made.data(names) if data is None else data
        self.engine.call(m.AdapterChunk, index, tuple(names), data)

    def rebuild(self, **changes) -> None:
        fields = {"version": 2, "base_digest": self.manifest.base_digest, "config_digest": self.manifest.config_digest,
                  "created_step": 0, "previous": "", "tensors": self.manifest.tensors} | changes
        self.manifest = AdapterManifest.build(**fields)

    def entries(self, change):
        self.rebuild(tensors=[change(t) for t in self.manifest.tensors])


def stale(sync: Sync) -> None:
    sync.rebuild(version=1)
    sync.begin()


def other_base(sync: Sync) -> None:
    sync.rebuild(base_digest="sha256:other")
    sync.begin()


def zero_chunks(sync: Sync) -> None:
    sync.num_chunks = 0
    sync.begin()


def empty_export(sync: Sync) -> None:
    data = sync.manifest.to_json() | {"tensors": [], "count": 0, "total_bytes": 0}
    sync.engine.call(m.BeginAdapter, data, sync.config, 1)


def unknown_target(sync: Sync) -> None:
    sync.config = dataclasses.replace(sync.config, targets=("attn_out", "router"))
    sync.begin()


def fewer_targets_than_served(sync: Sync) -> None:
    sync.config = dataclasses.replace(sync.config, targets=("attn_out",))
    sync.begin()


def other_rank_than_served(sync: Sync) -> None:
    sync.config = dataclasses.replace(sync.config, rank=8)
    sync.begin()


def other_scale_than_manifest(sync: Sync) -> None:
    sync.config = dataclasses.replace(sync.config, alpha=99.0)
    sync.begin()


def missing_tensor(sync: Sync) -> None:
    sync.rebuild(tensors=sync.manifest.tensors[1:])
    sync.begin()


def extra_tensor(sync: Sync) -> None:
    sync.rebuild(tensors=[*sync.manifest.tensors, tensor_entry("model.layers.0.extra.lora_A.weight", torch.ones(2))])
    sync.begin()


def other_shape(sync: Sync) -> None:
    sync.entries(lambda t: dataclasses.replace(t, shape=(*t.shape[:-1], t.shape[-1] + 1)))
    sync.begin()


def other_dtype(sync: Sync) -> None:
    sync.entries(lambda t: dataclasses.replace(t, dtype="bfloat16"))
    sync.begin()


def wrong_nbytes(sync: Sync) -> None:
    sync.entries(lambda t: dataclasses.replace(t, nbytes=t.nbytes + 4))
    sync.begin()


def forged_manifest(sync: Sync) -> None:
    sync.engine.call(m.BeginAdapter, sync.manifest.to_json() | {"created_step": 9}, sync.config, sync.num_chunks)


def begun_twice(sync: Sync) -> None:
    sync.begin()
    try:
        sync.begin()
    finally:
        sync.engine.call(m.AbortAdapter)


def flipped_bit(sync: Sync) -> None:
    sync.begin()
    data = bytearray(sync.made.data(sync.made.chunks()[0]))
    data[5] ^= 1
    sync.chunk(0, data=bytes(data))


def truncated_chunk(sync: Sync) -> None:
    sync.begin()
    sync.chunk(0, data=sync.made.data(sync.made.chunks()[0])[:-4])


def empty_chunk(sync: Sync) -> None:
    sync.begin()
    sync.chunk(0, names=[], data=b"")


def chunk_out_of_order(sync: Sync) -> None:
    sync.begin()
    sync.chunk(1)


def chunk_sent_twice(sync: Sync) -> None:
    sync.begin()
    sync.chunk(0)
    sync.chunk(0)


def tensor_sent_twice(sync: Sync) -> None:
    sync.begin()
    sync.chunk(0)
    sync.chunk(1, names=sync.made.chunks()[0])


def unknown_name(sync: Sync) -> None:
    sync.begin()
    sync.chunk(0, names=["model.layers.0.nope.lora_A.weight"], data=b"1234")


def not_a_number(sync: Sync) -> None:
    name = next(iter(sync.made.tensors))
    sync.made.tensors[name][0, 0] = torch.nan
    sync.manifest = sync.made.manifest(sync.engine.store.digest, 2)
    sync.begin()
    sync.chunk(0)


def shared_factor_differs(sync: Sync) -> None:
    name = next(n for n in sync.made.tensors if n.endswith("up_proj.lora_A.weight"))
    sync.made.tensors[name] = sync.made.tensors[name] + 1
    sync.manifest = sync.made.manifest(sync.engine.store.digest, 2)
    sync.begin()
    for index in range(sync.num_chunks):
        sync.chunk(index)


def commit_before_the_last_chunk(sync: Sync) -> None:
    sync.begin()
    sync.chunk(0)
    sync.engine.call(m.CommitAdapter, 2)


def commit_with_chunks_to_come(sync: Sync) -> None:
    sync.num_chunks += 1
    sync.begin()
    for index in range(sync.num_chunks - 1):
        sync.chunk(index)
    sync.engine.call(m.CommitAdapter, 2)


def commit_of_another_version(sync: Sync) -> None:
    sync.begin()
    for index in range(sync.num_chunks):
        sync.chunk(index)
    sync.engine.call(m.CommitAdapter, 3)


def commit_of_nothing(sync: Sync) -> None:
    sync.engine.call(m.CommitAdapter, 2)


def chunk_of_nothing(sync: Sync) -> None:
    sync.chunk(0)


REFUSALS: tuple[tuple[object, type[TidemillError], str], ...] = (
    (stale, StaleVersionError, "version 1 is not newer than version 1"),
    (other_base, IntegrityError, "made for base sha256:other"),
    (zero_chunks, ManifestError, "num_chunks = 0"),
    (empty_export, ManifestError, "no tensors"),
    (unknown_target, IntegrityError, "targets"),
    (fewer_targets_than_served, IntegrityError, "targets|expected rank"),
    (other_rank_than_served, IntegrityError, "rank 8"),
    (other_scale_than_manifest, IntegrityError, "config_digest"),
    (missing_tensor, ManifestError, "is missing"),
    (extra_tensor, ManifestError, "extra.lora_A.weight is unexpected"),
    (other_shape, ManifestError, "expected float32"),
    (other_dtype, ManifestError, "is bfloat16"),
    (wrong_nbytes, ManifestError, "is listed with"),
    (forged_manifest, ManifestError, "manifest_sha256"),
    (begun_twice, BusyError, "is open"),
    (flipped_bit, IntegrityError, "are not what the manifest says"),
    (truncated_chunk, IntegrityError, "bytes for"),
    (empty_chunk, IntegrityError, "0 bytes for 0 tensors"),
    (chunk_out_of_order, ManifestError, "chunk 1 came, expected 0"),
    (chunk_sent_twice, ManifestError, "chunk 0 came, expected 1"),
    (tensor_sent_twice, ManifestError, "came twice"),
    (unknown_name, ManifestError, "does not list"),
    (not_a_number, IntegrityError, "NaN or infinity"),
    (shared_factor_differs, ManifestError, "one shared factor"),
    (commit_before_the_last_chunk, ManifestError, "has not arrived"),
    (commit_with_chunks_to_come, ManifestError, "chunks arrived"),
    (commit_of_another_version, ManifestError, "commit of version 3"),
    (commit_of_nothing, BusyError, "no adapter sync is open"),
    (chunk_of_nothing, BusyError, "no adapter sync is open"),
)


@pytest.mark.parametrize(("attempt", "error", "text"), REFUSALS, ids=lambda v: getattr(v, "__name__", ""))
def test_refused_and_the_old_version_stays_served(driver, adapter, attempt, error, text):
    engine = driver()
    served = adapter(engine, seed=1)
    engine.sync(served, 1)
    before = engine.generate(PROMPT, max_tokens=3, name="same")
    with pytest.raises(error, match=text):
        attempt(Sync(engine, adapter(engine, seed=2)))
    assert engine.generate(PROMPT, max_tokens=3, name="same") == before
    assert engine.core.adapters._sync is None
    engine.sync(adapter(engine, seed=2), 2)
    assert engine.generate(PROMPT, max_tokens=3).versions == (2, 2, 2)


def test_rank_above_the_limit_is_a_capacity_error(driver, adapter):
    engine = driver(max_lora_rank=4)
    with pytest.raises(CapacityError, match="rank 5 is above max_lora_rank = 4"):
        engine.sync(adapter(engine, seed=1, rank=5), 1)


def test_an_adapter_folder_is_loaded_at_start_through_the_same_checks(bases, driver, adapter, tmp_path: Path):
    engine = driver()
    made = adapter(engine, seed=1)
    engine.sync(made, 3)
    write_adapter(tmp_path / "a", made.lora, made.tensors, made.manifest(engine.store.digest, 3))
    core = load_core(EngineSpec(model=bases["tiny"], config=engine.core.config, adapter=tmp_path / "a"))
    assert (core.version, core.adapters.digest) == (3, engine.core.adapters.digest)
    with pytest.raises(IntegrityError, match="made for base"):
        load_core(EngineSpec(model=bases["toy"], config=engine.core.config, adapter=tmp_path / "a"))


SYNC_MEMORY = """
import dataclasses, gc, torch
from pathlib import Path
from tidemill.core.engine_api import AdapterConfig
from tidemill.core.manifest import AdapterManifest
from tidemill.engine.adapters import AdapterStore
from tidemill.engine.memory.limits import resident_bytes
from tidemill.model import presets
from tidemill.model.lora import LoraConfig, adapter_shapes, build_manifest
from tidemill.model.tensor_bytes import tensor_bytes

torch.set_num_threads(1)
text = dataclasses.replace(presets.toy(128).text_config, num_experts=256, moe_intermediate_size=512,
                           routed_expert_hidden_size=512)
lora = LoraConfig(rank=16, targets=("experts",))
tensors = {name: torch.zeros(shape) for name, shape in adapter_shapes(text, lora).items()}
names = list(tensors)
chunks = [names[i : i + 6] for i in range(0, len(names), 6)]
payloads = [b"".join(bytes(tensor_bytes(tensors[n])) for n in part) for part in chunks]
listed = build_manifest(tensors, version=1, base_digest="b", config_digest=lora.digest, created_step=0).tensors
store = AdapterStore(text, "b", max_rank=64)
peaks = []

def high_water() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024

for version in range(1, 5):
    manifest = AdapterManifest.build(version=version, base_digest="b", config_digest=lora.digest, created_step=0,
                                     previous="", tensors=listed)
    start = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark so far
    store.begin(manifest, AdapterConfig(rank=16, alpha=lora.alpha, targets=lora.targets), len(chunks))
    for index, (part, data) in enumerate(zip(chunks, payloads, strict=True)):
        store.chunk(index, part, bytes(bytearray(data)))  # a copy of its own, as it would arrive
    store.commit(version)
    peaks.append(high_water() - start)
    gc.collect()
print(sum(x.nbytes for x in tensors.values()), max(map(len, payloads)), *peaks)
"""


def test_a_sync_takes_at_most_two_chunks_beside_its_slots():
    """A 72 MiB adapter in chunks of one layer's experts, by the high-water mark of resident memory. In a process of
    its own, where malloc is told to return what is freed at once; otherwise its cache would be measured."""
    done = subprocess.run([sys.executable, "-c", SYNC_MEMORY], capture_output=True, text=True, timeout=110, check=True,
                          env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"})
    slot, chunk, *peaks = map(int, done.stdout.split())
    assert chunk > 16 << 20
    for peak in peaks[1:]:  # from the second on, one slot is live and the other received into
        assert slot * 0.9 < peak <= slot + 2 * chunk + (4 << 20)
