"""Loading with little memory, at real sizes: `make soak ONLY=slice`.

Writes a checkpoint of K3's own widths - an MLA layer with the dense block and a KDA layer with 16 routed experts,
packed, names as released, in several shards - with random bytes to a temporary folder, opens and loads it in a process
of its own, and measures that process's private memory. Met if the peak above the loaded model is at most the largest
tensor plus 256 MiB. Then converts the slice in another process, whose limit is the same above what it started with.
Writes benchmarks/soak/slice.json. Needs about 8 GB of disk and of memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import conclude, write_soak
from torch import Tensor

from tidemill.model.checkpoint import Checkpoint
from tidemill.model.config import LinearAttnConfig, ModelConfig
from tidemill.model.convert import Wanted, convert
from tidemill.model.names import TEXT_PREFIX, storage_order
from tidemill.model.presets import k3
from tidemill.model.shards import plan_shards, write_index
from tidemill.model.tensor_bytes import TensorPlan, stream_tensors

ALLOWED = 256 << 20
_SHARD_BYTES = 1_000_000_000
_PIECE = 1 << 22
_VOCABULARY = 8192


def slice_config() -> ModelConfig:
    """K3 with two layers, 16 experts and a short vocabulary; every other width is the released one."""
    text = k3().text_config
    linear = dataclasses.replace(text.linear_attn_config, full_attn_layers=(1,), kda_layers=(2,))
    assert isinstance(linear, LinearAttnConfig)
    return ModelConfig(text_config=dataclasses.replace(
        text, num_hidden_layers=2, linear_attn_config=linear, num_experts=16, num_experts_per_token=4,
        vocab_size=_VOCABULARY, bos_token_id=None, eos_token_id=None, pad_token_id=None))


def write_slice(folder: Path, config: ModelConfig) -> int:
    """Write the slice with random values, a piece at a time; returns the bytes of its largest tensor in memory."""
    plans = [dataclasses.replace(t.plan, name=TEXT_PREFIX + t.name) for t in storage_order(config.text_config)]
    shards = plan_shards([[plan] for plan in plans], _SHARD_BYTES)
    config.write(folder)
    generator = torch.Generator().manual_seed(7)
    for shard in shards:
        stream_tensors(folder / shard.name, shard.tensors, lambda t: _random(t, generator, config))
    write_index(folder, shards)
    return max(math.prod(plan.shape) * getattr(torch, plan.dtype).itemsize for plan in plans)


def _random(plan: TensorPlan, generator: torch.Generator, config: ModelConfig) -> Iterator[Tensor]:
    left = math.prod(plan.shape)
    if plan.name.endswith("A_log"):
        heads = config.text_config.linear_attn_config.num_heads
        yield torch.cat([torch.rand(heads, generator=generator), torch.zeros(left - heads)])
        return
    while left:
        count = min(left, _PIECE)
        if plan.dtype == "uint8":
            low, high = (110, 130) if plan.name.endswith("weight_scale") else (0, 256)
            yield torch.randint(low, high, (count,), generator=generator, dtype=torch.uint8)
        else:
            yield (torch.randn(count, generator=generator) * 0.02).to(getattr(torch, plan.dtype))
        left -= count


def private_bytes() -> int:
    """Private memory of this process now, clean and dirty."""
    rows = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("Private_")) << 10


def status_bytes(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    rows = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(field + ":")) << 10


def reset_peak() -> None:
    """Let VmHWM begin again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def child_load(folder: str) -> dict[str, int]:
    """Load the whole folder. The peak of private memory is at most VmHWM less what was shared with others all along
    (libraries), which is taken from the state before."""
    before, shared = private_bytes(), status_bytes("VmRSS") - private_bytes()
    reset_peak()
    started = time.monotonic()
    model = Checkpoint.open(Path(folder)).model()
    seconds = time.monotonic() - started
    peak, final = status_bytes("VmHWM") - shared, private_bytes()
    held = sum(x.numel() * x.element_size() for x in model.state_dict().values())
    return {"before": before, "peak": peak, "final": final, "model_bytes": held, "milliseconds": int(1000 * seconds)}


def child_convert(source: str, target: str) -> dict[str, int]:
    """Convert the folder to plain bf16 experts, stacked."""
    before, shared = private_bytes(), status_bytes("VmRSS") - private_bytes()
    reset_peak()
    started = time.monotonic()
    convert(Path(source), Path(target), Wanted(experts="bf16", layout="stacked", max_shard_bytes=_SHARD_BYTES))
    seconds = time.monotonic() - started
    return {"before": before, "peak": status_bytes("VmHWM") - shared, "milliseconds": int(1000 * seconds)}


def measured(*arguments: str) -> dict[str, int]:
    """Run one of the children and read what it measured."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    """Run, write, print, exit."""
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="tidemill-slice-") as made:
        folder = Path(made) / "slice"
        folder.mkdir()
        largest_stored = write_slice(folder, slice_config())
        files = sorted(folder.glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        loaded = measured("load", str(folder))
        converted = measured("convert", str(folder), str(Path(made) / "converted"))
    above, above_convert = loaded["peak"] - loaded["final"], converted["peak"] - converted["before"]
    limit = largest_stored + ALLOWED
    met = above <= limit and above_convert <= limit
    path = write_soak("slice", 1, {
        "checkpoint_bytes": size, "shards": len(files), "largest_tensor_bytes": largest_stored, "limit_bytes": limit,
        "load": loaded | {"peak_minus_final": above}, "convert": converted | {"peak_minus_before": above_convert},
        "met": met,
    }, started=started)
    conclude(f"slice: {size / 1e9:.2f} GB; loading peaks {above / 2**20:.0f} MiB above the loaded model, converting "
             f"{above_convert / 2**20:.0f} MiB above its start; limit {limit / 2**20:.0f} MiB", path, met=met)


if __name__ == "__main__":
    children = {"load": child_load, "convert": child_convert}
    print(json.dumps(children[sys.argv[1]](*sys.argv[2:])))
