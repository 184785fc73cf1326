"""What the nano that comes with the package can do: `make bench ONLY=nano`.

Writes benchmarks/results/nano.json, and measured.json and the card into the model's folder. Held-out text needs the
packages the recipe names; skills need nothing.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Metric, Value, bootstrap, commit, write_result

from tidemill.agent.episode import Draw, Episode, Harness
from tidemill.agent.rollout import EpisodeRequest, run_episodes
from tidemill.agent.scaffold import Scaffold
from tidemill.agent.stats import wilson
from tidemill.agent.task import Split, Task, load_task
from tidemill.agent.tool import load_tool
from tidemill.core.files import write_json
from tidemill.engine import EmbeddedEngine, EngineConfig, EngineSpec, load_core
from tidemill.model.base import BaseStore
from tidemill.model.chat import ChatCodec, Tokenizer
from tidemill.model.shipped import shipped_model
from tidemill.train.config import AgentSection
from tidemill.train.pretrain.card import MEASURED, write_card
from tidemill.train.pretrain.held_out import sample_nats
from tidemill.train.pretrain.ngram import ByteNgram
from tidemill.train.pretrain.recipe import Recipe, load_recipe
from tidemill.train.pretrain.sources import FileSource, open_source
from tidemill.train.samples import packed_batches

TOKENS = int(os.environ.get("NANO_BENCH_TOKENS", "60000"))
"""Held-out tokens of each text."""
EPISODES = int(os.environ.get("NANO_BENCH_EPISODES", "1024"))
"""Problems of each skill at most."""
ORDERS = (5, 6, 7)
"""Of the n-gram model; the best on the held-out text counts."""
SEED = 20_261
_LABELS = {"toolbox": "toolbox: right call and right answer", "echo": "echo: a phrase said again, letter by letter"}


def text_bits(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Bits per byte of the model and of the best n-gram model, on the same excerpts."""
    codec = ChatCodec(Tokenizer.load(folder))
    model = BaseStore.open(folder).model()
    sources = [s for section in recipe.data if section.text
               if isinstance(s := open_source(section, codec, seed=recipe.seed, held_out=recipe.held_out.share,
                                              context=recipe.context), FileSource)]
    ours: list[float] = []
    texts: list[bytes] = []
    for source in sources:
        tokens = 0
        for found, text in zip(source.held_out(), source.texts(held_out=True), strict=True):
            if tokens >= TOKENS:
                break
            pieces = list(found.document.pieces(recipe.context))
            nats = sample_nats(model, pieces, cut=partial(packed_batches, max_tokens=recipe.micro_batch_tokens),
                               end_id=codec.vocabulary.control.eos)
            ours.append(float(nats[1].sum()) / math.log(2))
            texts.append(text)
            tokens += sum(len(piece.ids) for piece in pieces)
    sizes = [len(text) for text in texts]
    peers = {}
    for order in ORDERS:
        ngram = ByteNgram((text for source in sources for text in source.texts(held_out=False)), order)
        peers[order] = [-float(ngram.log2_probabilities(text).sum()) for text in texts]
    best = min(peers, key=lambda order: sum(peers[order]))
    return {"order": best, "documents": len(texts), "bytes": sum(sizes), "model": asdict(per_byte(ours, sizes)),
            "ngram": asdict(per_byte(peers[best], sizes)),
            "ratio": asdict(ratio(peers[best], ours))}


def per_byte(bits: Sequence[float], sizes: Sequence[int]) -> Value:
    return ratio(bits, sizes)


def ratio(above: Sequence[float], below: Sequence[float]) -> Value:
    """Sum over sum with a bootstrap interval over documents."""
    pairs = list(range(len(above)))
    return bootstrap(pairs, lambda drawn: sum(above[i] for i in drawn) / sum(below[i] for i in drawn))


async def played(folder: Path, task: Task, *, temperature: float, n: int) -> list[Episode]:
    """Test problems of a task, every turn written by the model."""
    codec = ChatCodec(Tokenizer.load(folder))
    tools = [load_tool(name) for name in task.tools]
    settings = AgentSection(scaffold="free", max_turns=2, max_sampled_tokens=160, max_model_len=768, concurrency=64)
    config = EngineConfig(max_model_len=768, max_running=64, num_slots=64, max_batched_tokens=2048)
    engine = EmbeddedEngine(lambda: load_core(EngineSpec(model=folder, config=config)))
    try:
        harness = Harness(engine=engine, task=task, tools=tools, settings=settings,
                          scaffold=Scaffold(codec, tools, declare=task.declare_tools))
        requests = [EpisodeRequest(episode_id=f"{i}", problem=task.make(Split.TEST, i, SEED),
                                   draw=Draw(seed=SEED, sequence=i, temperature=temperature)) for i in range(n)]
        return await run_episodes(harness, requests, concurrency=64)
    finally:
        await engine.close()


def share(marks: Sequence[bool]) -> dict[str, float]:
    low, high = wilson(sum(marks), len(marks))
    return {"point": sum(marks) / len(marks), "lo95": low, "hi95": high, "n": len(marks)}


def well_formed(episode: Episode, task: Task) -> bool | None:
    """Whether the first call is one the tools accept; None if the request needs no call."""
    split, index, seed = episode.problem_id.rsplit("-", 2)
    wanted = task.make(Split(split), int(index), int(seed)).metadata["request"]
    if not wanted.tool:
        return None
    return bool(episode.tool_calls) and not episode.tool_calls[0].error


def skills(folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for section in recipe.data:
        if section.task is None:
            continue
        task = load_task(section.task.name, section.task.options)
        n = min(EPISODES, task.size(Split.TEST))
        found = {name: asyncio.run(played(folder, task, temperature=t, n=n))
                 for name, t in (("sampled", 1.0), ("greedy", 0.0))}
        print(f"{section.name}: " + ", ".join(f"{k} {sum(bool(e.verdict and e.verdict.correct) for e in v)}/{n}"
                                              for k, v in found.items()), flush=True)
        if task.name == "toolbox":
            formed = {k: [m for e in v if (m := well_formed(e, task)) is not None] for k, v in found.items()}
            rows.append({"id": "well_formed_calls", "skill": "toolbox: well-formed tool calls",
                         "n": len(formed["sampled"]), **{k: share(v) for k, v in formed.items()}})
        marks = {k: [bool(e.verdict and e.verdict.correct) for e in v] for k, v in found.items()}
        label = _LABELS.get(task.name) or f"reasoning-gym {section.name}"
        rows.append({"id": section.name, "skill": label, "n": n, **{k: share(v) for k, v in marks.items()}})
    return rows


def main() -> None:
    """Measure, and write the result, measured.json and the card."""
    started = time.time()
    torch.set_num_threads(1)
    folder, recipe = shipped_model("nano"), load_recipe("nano")
    bits, rows = text_bits(folder, recipe), skills(folder, recipe)
    measured = {"when": datetime.now(UTC).date().isoformat(), "commit": commit(), "bits_per_byte": bits, "skills": rows}
    metrics = [
        Metric(id="bits_per_byte_vs_ngram", unit="ratio", value=Value(**bits["ratio"]), ours=bits["model"],
               peer=bits["ngram"], shape=f"n-gram bits / model bits, {bits['bytes']} held-out bytes"),
        *(Metric(id=row["id"], unit="share", value=Value(**row["sampled"]), ours={"greedy": row["greedy"]["point"]},
                 shape=f"{row['skill']}, temperature 1, whole turns written by the model") for row in rows),
    ]
    write_result("nano", metrics, peers={"ngram": f"order {bits['order']}, interpolated Kneser-Ney"}, started=started)
    write_json(folder / MEASURED, measured)
    write_card(folder)
    print(f"card {folder / 'README.md'}")
