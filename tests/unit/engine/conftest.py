"""Fixtures of the engine tests: small random bases on disk, engines over them, adapters, and a driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tidemill.core.engine_api import Completion, GenerateRequest, SamplingParams
from tidemill.core.manifest import AdapterManifest
from tidemill.engine import messages as m
from tidemill.engine.config import EngineConfig
from tidemill.engine.core import EngineCore
from tidemill.engine.weights import EngineWeights
from tidemill.model import presets
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import ModelConfig
from tidemill.model.lora import LoraConfig, adapter_shapes, build_manifest
from tidemill.model.tensor_bytes import tensor_bytes


def spread(model: CausalLM, seed: int) -> CausalLM:
    """Give every tensor values that switch every mechanism on: gains, biases, decays and queries all spread out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in model.state_dict().items():
            std, mean = 1.5 * x.shape[-1] ** -0.5, 0.0
            if name.endswith(("norm.weight", "layernorm.weight")):
                std, mean = 0.25, 1.0
            elif name.endswith("A_log"):
                std, mean = 0.4, 0.25
            elif name.endswith("dt_bias"):
                std, mean = 2.0, -2.5
            elif name.endswith("e_score_correction_bias"):
                std = 0.3
            elif name.endswith("conv1d.weight"):
                std = 0.6
            elif name.endswith("embed_tokens.weight"):
                std = 1.0
            x.copy_(torch.randn(x.shape, generator=generator) * std + mean)
            if name.endswith("A_log"):
                x.view(-1)[model.config.text_config.linear_attn_config.num_heads :] = 0.0  # padding
    return model


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random bases: `tiny` (7 layers, vocabulary 96) and `toy` (4 layers, vocabulary 128) in fp32 with every
    mechanism spread out, `linear` is Kimi Linear at that size, `bf16` is tiny in bfloat16, `fresh` is toy as training
    starts from it."""
    torch.set_num_threads(1)
    configs: dict[str, ModelConfig] = {"tiny": presets.tiny(96), "toy": presets.toy(128),
                                       "linear": presets.tiny_linear(96)}
    folders: dict[str, Path] = {}
    for seed, (name, config) in enumerate(configs.items()):  # new ones at the end: the number is the seed
        folders[name] = tmp_path_factory.mktemp("bases") / name
        write_base(folders[name], spread(CausalLM(config), seed))
    folders["bf16"] = tmp_path_factory.mktemp("bases") / "bf16"
    write_base(folders["bf16"], spread(CausalLM(presets.tiny(96, dtype="bfloat16")), seed=6))
    folders["fresh"] = tmp_path_factory.mktemp("bases") / "fresh"
    write_base(folders["fresh"], CausalLM(presets.toy(128), seed=4))
    return folders


class Driver:
    """An EngineCore with its calls made and answered in one place."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.store = BaseStore.open(folder)
        sizes = {"max_model_len": 512, "max_running": 8, "max_batched_tokens": 64, "prefill_chunk": 32,
                 "pool_bytes": 1 << 26} | config
        self.core = EngineCore(EngineWeights(self.store, name=folder.name), EngineConfig(**sizes))
        self.replies: dict[int, m.Reply] = {}
        self.tokens: list[m.Token] = []
        self.next_call = 0

    def post(self, kind: Callable[..., m.Message], *args: Any) -> int:
        self.next_call += 1
        self.core.submit(kind(self.next_call, *args))
        return self.next_call

    def step(self) -> None:
        for reply in self.core.step():
            if isinstance(reply, m.Token):
                self.tokens.append(reply)
            else:
                assert reply.call_id not in self.replies, "a call ends once"
                self.replies[reply.call_id] = reply
        self.core.check()

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def call(self, kind: Callable[..., m.Message], *args: Any) -> Any:
        """Post, run until idle, return the value or raise the error."""
        call_id = self.post(kind, *args)
        self.run()
        return self.result(call_id)

    def result(self, call_id: int) -> Any:
        reply = self.replies[call_id]
        if isinstance(reply, m.Failure):
            raise reply.error
        assert isinstance(reply, m.Result)
        return reply.value

    def start(self, ids: Sequence[int], *, name: str = "", session: str | None = None, scores: bool = False,
              stream: bool = False, **sampling: Any) -> int:
        name = name or f"r{self.next_call}"
        return self.post(m.Generate, request(ids, name=name, session=session, scores=scores, **sampling), stream)

    def generate(self, ids: Sequence[int], **kwargs: Any) -> Completion:
        call = self.start(ids, **kwargs)
        self.run()
        return self.result(call)

    def sync(self, adapter: Adapter, version: int, **changes: Any) -> str:
        """A whole adapter sync."""
        manifest = adapter.manifest(self.store.digest, version)
        self.call(m.BeginAdapter, manifest.to_json(), adapter.lora.to_adapter_config(), len(adapter.chunks()))
        for index, names in enumerate(adapter.chunks()):
            self.call(m.AdapterChunk, index, tuple(names), adapter.data(names))
        return self.call(m.CommitAdapter, version)


def request(ids: Sequence[int], *, name: str, session: str | None = None, scores: bool = False,
            **sampling: Any) -> GenerateRequest:
    params = {"max_tokens": 8, "temperature": 1.0, "seed": 7} | sampling
    return GenerateRequest(request_id=name, ids=tuple(ids), session_id=session, prompt_logprobs=scores,
                           sampling=SamplingParams(**params))


class Adapter:
    """Random exported factors for a base, cut into chunks of about 8 KiB."""

    def __init__(self, config: ModelConfig, *, seed: int, **lora: Any) -> None:
        self.config = config
        self.lora = LoraConfig(**({"rank": 4, "alpha": 8.0} | lora))
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        for name, shape in adapter_shapes(config.text_config, self.lora).items():
            x = torch.randn(shape, generator=generator) * 0.2
            twin = name.replace("up_proj.lora_A", "gate_proj.lora_A").replace("w3.lora_A", "w1.lora_A")
            self.tensors[name] = shared.setdefault(twin, x).to(getattr(torch, self.lora.dtype))

    def manifest(self, base_digest: str, version: int) -> AdapterManifest:
        return build_manifest(self.tensors, version=version, base_digest=base_digest, created_step=0,
                              config_digest=self.lora.digest)

    def chunks(self) -> list[list[str]]:
        chunks: list[list[str]] = [[]]
        size = 0
        for name, x in self.tensors.items():
            if chunks[-1] and size + x.nbytes > 8192:
                chunks.append([])
                size = 0
            chunks[-1].append(name)
            size += x.nbytes
        return chunks

    def data(self, names: Sequence[str]) -> bytes:
        return b"".join(bytes(tensor_bytes(self.tensors[name])) for name in names)


@pytest.fixture(scope="session")
def driver(bases: dict[str, Path]) -> Callable[..., Driver]:
    """Make an engine: driver("tiny", max_running=4, ...)."""
    return lambda name="tiny", **config: Driver(bases[name], **config)


@pytest.fixture(scope="session")
def adapter() -> Callable[..., Adapter]:
    """Make an adapter for a driver's base: adapter(driver, seed=1, rank=4, ...)."""
    return lambda engine, **kwargs: Adapter(engine.store.config, **kwargs)
