"""Loading and saving stream: measured in a process of its own, at a size where holding the model twice would show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from tidemill.model.base import write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.presets import tiny_linear

MIB = 1 << 20
CHILD = """
import json, sys
from pathlib import Path
from tidemill.model.base import write_base
from tidemill.model.checkpoint import Checkpoint

def status(field):
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(field)) << 10

def reset():
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")

before = reset()
model = Checkpoint.open(Path(sys.argv[1])).model()
loaded, final = status("VmHWM"), reset()
write_base(Path(sys.argv[2]), model, max_shard_bytes=20_000_000)
print(json.dumps({"held": final - before, "above_loaded": loaded - final, "above_saving": status("VmHWM") - final}))
"""


def test_loading_and_saving_hold_one_tensor_at_a_time(tmp_path: Path) -> None:
    config = tiny_linear(80_000, dtype="bfloat16", moe_intermediate_size=1024, num_experts=64, quantize_experts=True)
    model = CausalLM(config, initialise=False)
    sizes = [x.numel() * x.element_size() for x in model.state_dict().values()]
    with torch.no_grad():
        for x in model.state_dict().values():
            x.fill_(0.5)
    assert sum(sizes) > 8 * max(sizes) > 64 * MIB
    write_base(tmp_path / "a", model, max_shard_bytes=10_000_000)
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "a"), str(tmp_path / "b")], check=True,
                          stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    assert found["held"] > sum(sizes)
    assert found["above_loaded"] <= max(sizes) + 8 * MIB
    assert found["above_saving"] <= max(sizes) + 8 * MIB
