"""`tidemill model`: what a model is, and checkpoint folders into other forms.

Results go to stdout, progress to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.cli.model_source import parse_pool_bytes
from tidemill.core.errors import InputError
from tidemill.model.config import ModelConfig
from tidemill.model.convert import Progress, Wanted, convert
from tidemill.model.info import ModelInfo, describe, describe_folder, preset_licence
from tidemill.model.peft_layouts import merge
from tidemill.model.plan import GIB, RESERVE, MemoryPlan, gpus_needed, memory_plan
from tidemill.model.presets import BY_VOCABULARY, PRESETS

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_PRESET_VOCABULARY = 4096


@app.command()
def info(
    model: Annotated[str, typer.Argument(help=f"Preset ({', '.join([*PRESETS, 'toy', 'tiny'])}) or a model folder.")],
    gpus: Annotated[int, typer.Option(min=0, help="Plan the memory of so many accelerators.")] = 0,
    mem: Annotated[float, typer.Option(min=0, help="Memory of each, in GiB.")] = 80.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Parameters, tensors, bytes, states and caches, a memory plan, and the licence of the weights."""
    config, found = _described(model)
    memory = int(mem * GIB)
    plan = memory_plan(config.text_config, gpus, memory) if gpus else None
    needed = gpus_needed(config.text_config, memory) if plan is not None and not plan.fits else None
    if as_json:
        data: dict[str, Any] = {"model": model, **dataclasses.asdict(found)}
        if plan is not None:
            data["plan"] = dataclasses.asdict(plan) | {"fits": plan.fits, "gpus_needed": plan.gpus if plan.fits else
                                                       needed}
        print(json.dumps(data, indent=2))
        return
    for line in (*_info_lines(model, found), *(_plan_lines(plan, needed) if plan is not None else ())):
        print(line)


@app.command(name="convert")
def convert_command(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder in Hugging Face layout, or a GGUF file.")],
    target: Annotated[Path, typer.Argument(help="New folder, or with --to gguf a file.")],
    to: Annotated[str, typer.Option(help="hf (a folder) or gguf.")] = "hf",
    experts: Annotated[str, typer.Option(help="mxfp4 (packed), bf16 or f32 (plain), keep.")] = "keep",
    layout: Annotated[str, typer.Option(help="per-expert, stacked, keep.")] = "keep",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; weights are rounded to it. Default: as it is.")] = "",
    shard_bytes: Annotated[str, typer.Option(help="Largest weight file, e.g. 4GiB.")] = "5000000000",
    tokenizer: Annotated[bool, typer.Option("--tokenizer/--no-tokenizer", help="Into and out of GGUF files.")] = True,
) -> None:
    """Make a model folder (with digests) or a GGUF file of a checkpoint. After a kill the same command goes on."""
    if to not in ("hf", "gguf"):
        raise InputError(f"--to {to!r}: expected hf or gguf", field="to")
    if not source.exists():
        raise InputError(f"{source} does not exist", field="source")
    if to == "gguf" or source.is_file():
        _through_gguf(source, target, to, experts, layout, dtype, tokenizer)
        return
    size = parse_pool_bytes(shard_bytes)
    if not isinstance(size, int):
        raise InputError(f"--shard-bytes {shard_bytes!r}: expected bytes, or a number with KiB, MiB or GiB",
                         field="shard_bytes")
    wanted = Wanted(experts=experts, layout=layout, dtype=dtype or None, max_shard_bytes=size)
    with _progress(f"converting {source}") as progress:
        manifest = convert(source, target, wanted, progress)
    print(f"{target}: {len(manifest.tensors):,} tensors, {sum(t.nbytes for t in manifest.tensors):,} bytes, "
          f"{manifest.base_digest}")


@app.command(name="merge")
def merge_command(
    base: Annotated[Path, typer.Argument(help="Model folder with plain (not packed) experts.")],
    adapter: Annotated[Path, typer.Argument(help="PEFT folder.")],
    target: Annotated[Path, typer.Argument(help="New folder.")],
) -> None:
    """Merge a LoRA adapter into a bf16 or fp32 model."""
    manifest = merge(base, adapter, target)
    print(f"{target}: {len(manifest.tensors):,} tensors, {manifest.base_digest}")


def _through_gguf(source: Path, target: Path, to: str, experts: str, layout: str, dtype: str,
                  tokenizer: bool) -> None:
    from tidemill.model.gguf import export_gguf, import_gguf

    if layout != "keep":
        raise InputError(f"--layout {layout!r} means nothing for GGUF files", field="layout",
                         remedy="Convert the resulting folder once more.")
    expert_kind: Any = None if experts == "keep" else experts
    wanted_dtype: Any = dtype or None
    with _progress(f"converting {source}") as progress:
        if to == "gguf":
            if dtype:
                raise InputError("--dtype means nothing with --to gguf", field="dtype",
                                 remedy="Convert to a folder of that dtype first.")
            size = export_gguf(source, target, experts=expert_kind, tokenizer=tokenizer, progress=progress)
            done = f"{target}: {size:,} bytes"
        else:
            if experts != "keep":
                raise InputError(f"--experts {experts!r}: experts of a GGUF file are taken as they are",
                                 field="experts", remedy="Convert the resulting folder once more.")
            manifest = import_gguf(source, target, dtype=wanted_dtype, tokenizer=tokenizer, progress=progress)
            done = f"{target}: {len(manifest.tensors):,} tensors, {manifest.base_digest}"
    print(done)


def _described(model: str) -> tuple[ModelConfig, ModelInfo]:
    folder = Path(model)
    if (folder / "config.json").is_file():
        return describe_folder(folder)
    if model in PRESETS:
        config = PRESETS[model]()
    elif model in BY_VOCABULARY:
        config = BY_VOCABULARY[model](_PRESET_VOCABULARY)
    else:
        raise InputError(f"{model!r} is neither a preset ({', '.join(PRESETS)}) nor a folder with a config.json",
                         field="model")
    return config, describe(config, licence=preset_licence(model))


def _info_lines(model: str, found: ModelInfo) -> Iterator[str]:
    yield f"{model}: family {found.family}"
    yield f"parameters              {found.total:>26,}"
    for name, count in sorted(found.components.items(), key=lambda item: -item[1]):
        yield f"  {name:<21} {count:>26,}  {100 * count / found.total:5.1f} %"
    yield f"active per token        {found.active:>26,}"
    yield f"checkpoint tensors      {found.tensors:>26,}"
    yield f"checkpoint bytes        {found.total_bytes:>26,}"
    for name, size in sorted(found.bytes_by_dtype.items(), key=lambda item: -item[1]):
        yield f"  {name:<21} {size:>26,}"
    yield f"state per sequence      {found.state_bytes_per_sequence:>26,} bytes, whatever its length"
    yield f"cache per token         {found.cache_bytes_per_token:>26,} bytes"
    yield f"residual bank           {found.bank_rows:>26,} rows per token in flight"
    yield f"longest sequence        {found.max_positions:>26,} tokens"
    yield f"licence of the weights: {found.licence}"


def _plan_lines(plan: MemoryPlan, needed: int | None) -> Iterator[str]:
    def gib(size: int) -> str:
        return f"{size / GIB:>10.2f} GiB"

    yield ""
    yield f"text model on {plan.gpus} x {plan.memory / GIB:.0f} GiB, on each:"
    yield f"  routed experts      {gib(plan.experts)}  1/{plan.expert_group} of them"
    yield f"  heads and columns   {gib(plan.split)}  1/{plan.tensor_group} of them"
    for name, size in sorted(plan.replicated.items(), key=lambda item: -item[1]):
        yield f"  replicated          {gib(size)}  {name}"
    yield f"  reserve             {gib(plan.reserve)}  {100 * RESERVE:.0f} % for activations and the runtime (assumed)"
    yield f"  states and caches   {gib(plan.room)}"
    if not plan.fits:
        more = f"{needed} of these would" if needed else "no number of these would: the replicated parts are too large"
        yield f"It does not fit: {more}."
        return
    yield "It fits. Whole sequences at once, on all together:"
    for tokens, count in plan.sequences.items():
        yield f"  {count:>8,} of {tokens:>9,} tokens"


@contextmanager
def _progress(title: str) -> Iterator[Progress | None]:
    """A bar on stderr if somebody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda name, done, total: bar.update(task, completed=done, total=total)
