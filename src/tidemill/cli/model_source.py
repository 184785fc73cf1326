"""Which model a command means: a folder, one that comes with the package, or on request a preset with random
weights."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.core.errors import InputError
from tidemill.engine.random_model import write_random_model
from tidemill.model.presets import BY_VOCABULARY
from tidemill.model.shipped import find_model, shipped_names


@contextmanager
def model_folder(model: str, *, random_init: bool) -> Iterator[Path]:
    """The folder of `model`; a random one lives as long as the context. Raises InputError saying what would work."""
    if not random_init:
        folder = find_model(model)
        if folder is None:
            hint = f"{model!r} is a preset without trained weights: add --random-init to try it with random ones." \
                if model in BY_VOCABULARY else "Give the folder of a model (config.json, model.safetensors, " \
                f"tokenizer.json), a model of the package ({', '.join(shipped_names()) or 'none here'}), " \
                f"or a preset ({', '.join(BY_VOCABULARY)}) with --random-init."
            raise InputError(f"{model!r} is no model folder: it has no config.json.", field="model", remedy=hint)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tidemill-random-") as made:
        folder = Path(made) / model
        write_random_model(model, folder)
        print(f"note: {model} has random weights (--random-init); its answers mean nothing", file=sys.stderr)
        yield folder


def parse_pool_bytes(value: str) -> int | str:
    """`auto`, a number of bytes, or a number with KiB, MiB or GiB. Raises InputError."""
    if value == "auto":
        return value
    text, factor = value, 1
    for unit, power in (("KiB", 10), ("MiB", 20), ("GiB", 30)):
        if value.endswith(unit):
            text, factor = value.removesuffix(unit), 1 << power
    try:
        return int(float(text) * factor)
    except ValueError as e:
        raise InputError(f"--pool-bytes {value!r}: expected auto, bytes, or a number with KiB, MiB or GiB",
                         field="pool_bytes") from e
