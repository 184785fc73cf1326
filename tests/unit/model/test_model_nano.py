"""The model in the package is what its card says: its size, its bytes, and that it calls tools."""

from __future__ import annotations

import json

import pytest
import torch

from tidemill.agent.scaffold import Scaffold
from tidemill.agent.task import Split, load_task
from tidemill.agent.tool import load_tool
from tidemill.model.base import BaseStore
from tidemill.model.causal_lm import CausalLM
from tidemill.model.chat import ChatCodec, load_tokenizer
from tidemill.model.inventory import total_parameters
from tidemill.model.past import Past
from tidemill.model.shipped import shipped_model

FOLDER = shipped_model("nano")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return BaseStore.open(FOLDER).model()  # every tensor against its digest


def test_size(model: CausalLM) -> None:
    parameters = total_parameters(model.config.text_config)
    assert 3e6 <= parameters <= 8e6
    assert model.config.text_config.quantize_experts
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) <= 20e6
    assert json.loads((FOLDER / "training.json").read_text())["parameters"] == parameters


def test_the_card_states_what_was_measured() -> None:
    card, measured = (FOLDER / "README.md").read_text(), json.loads((FOLDER / "measured.json").read_text())
    training = json.loads((FOLDER / "training.json").read_text())
    assert "no general assistant" in card
    assert f"{training['tokens']:,} tokens" in card
    bits = measured["bits_per_byte"]
    assert f"{bits['model']['point']:.3f}" in card
    assert f"{bits['ngram']['point']:.3f}" in card
    shares = {row["id"]: row["sampled"]["point"] for row in measured["skills"]}
    assert shares["well_formed_calls"] >= 0.95
    levels = [share for name, share in shares.items() if name not in ("well_formed_calls", "toolbox", "echo")]
    assert sum(share >= 0.05 for share in levels) >= 3
    for source in json.loads((FOLDER / "data.json").read_text())["sources"].values():
        assert source["licence"] in card


def test_it_calls_tools_unaided(model: CausalLM) -> None:
    """Twelve requests of the test split, greedy: the calls are well formed and nearly always the right ones."""
    codec, task = ChatCodec(load_tokenizer(FOLDER)), load_task("toolbox")
    scaffold = Scaffold(codec, [load_tool(name) for name in task.tools], declare=task.declare_tools)
    problems = [task.make(Split.TEST, i, 5) for i in range(12)]
    prompts = [[*scaffold.prompt(p), *codec.encode(codec.generation_prefix(thinking=True))] for p in problems]
    past = Past(model.config.text_config, len(prompts))
    texts: list[list[int]] = [[] for _ in prompts]
    counts = torch.tensor([len(p) for p in prompts])
    new = torch.tensor([i for p in prompts for i in p])
    for _ in range(96):
        logits = model.go_on(new, counts, past, select=counts.cumsum(0) - 1)
        new, counts = logits.argmax(-1), torch.ones_like(counts)
        for text, token in zip(texts, new.tolist(), strict=True):
            text.append(token)
    right = 0
    for problem, text in zip(problems, texts, strict=True):
        parser = codec.parser()
        parser.push(text)
        parser.finish()
        calls, wanted = parser.message.tool_calls, problem.metadata["request"]
        right += ((calls[0].name, dict(calls[0].arguments)) == (wanted.tool, dict(wanted.arguments)) if calls
                  else not wanted.tool)
    assert right >= 9
