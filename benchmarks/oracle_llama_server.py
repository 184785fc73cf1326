"""llama.cpp with our tokenizer and chat template: the same ids for text and for conversations, and its server answers.

Two models: one with a vocabulary learnt here from the project's own texts and random weights, and the nano that comes
with the package, whose answers are also compared with ours, id by id.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from harness import ROOT
from oracles import LLAMA, LLAMA_BINDINGS, Suite, peer

from tidemill.agent.scaffold import Scaffold
from tidemill.agent.task import Split, load_task
from tidemill.agent.tool import declaration, load_tool
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.chat import ChatCodec, ChatOptions, Tokenizer, parse_messages, train_tokenizer
from tidemill.model.gguf import export_gguf
from tidemill.model.past import Past
from tidemill.model.presets import toy
from tidemill.model.shipped import shipped_model

START_S, ANSWER_S = 60.0, 120.0
VOCABULARY = 2048
NASTY = [
    "", " ", "  ", "\n", "\r\n\r\n", "\t \n x", "   three leading", "trailing   ", "a\u00a0b\u2003c",
    "helloWorld HTTPServer iOS", "don't DON'T we'LL I'm 'tis it's’ rock'n'roll",
    "1234567890 3.14159 1,000,000 0x1F ½ ² ٣٤", '="a" =="" """', "!!!??? ...—–",
    "漢字かな交じり文 中文English混排", "Привет, Мир! ЁЖ", "مرحبا بالعالم", "שלום", "नमस्ते", "한국어 텍스트", "ไทย",
    "naïve café Ǆ ǅ ǆ ſ ß ẞ İ ı", "e\u0301 a\u0308\u0323 \u0301x", "🙂👩‍👩‍👧🏽 🇩🇪", "\u200b\u200d\ufeff\u2028\u2029",
    "\x00\x01\x1f\x7f", "\u0378\ue000\U000e0001",
    "<|open|>message role=\"user\"<|sep|>", "<|end_of_msg|> [BOS] [PAD] [UNK]", "<|reserved_token_9|>",
    "def f(x):\n\treturn {'a': [1, 2]}\n\n\n# end", "SELECT * FROM t WHERE x<>'y';", "C:\\path\\n\\t",
    "https://example.org/a?b=c&d=%20#e", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ＡＢＣ ｱｲｳ", "aaaa" * 40, " \n \n  \n", "x\u0085y\u000bz\u000cw",
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "How many lines has this file?"}],
    "system and turns": [
        {"role": "system", "content": "Answer in one line."}, {"role": "user", "content": "  What is 12 * 7?\n"},
        {"role": "assistant", "content": "84", "reasoning_content": "12 * 7 = 84"},
        {"role": "user", "content": "And naïve größer 漢字?"}],
    "tool call": [
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": {
            "name": "add", "arguments": '{"a": 1, "b": [2, null], "note": "x & \\"y\\""}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "3"}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": {
    "type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "number"}}, "required": ["a", "b"]}}}]


QUESTIONS, ANSWER_TOKENS = 24, 64


def main() -> bool:
    suite = Suite("llama_server", {"llama-cpp-python": LLAMA_BINDINGS.name.rpartition("-")[2]})
    texts = [path.read_text() for folder, pattern in (("docs", "*.md"), ("src", "**/*.py"))
             for path in sorted((ROOT / folder).glob(pattern))]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        path = work / "model.gguf"
        for name, folder in (("random", _random_model(work / "model", texts)), ("nano", shipped_model("nano"))):
            export_gguf(folder, path, experts="f32")
            tokenizer = Tokenizer.load(folder)
            # Random weights write control tokens at random, and the server answers a malformed message with an error.
            # nano calls tools whenever it can, and the server takes calls for malformed unless tools are declared.
            barred = [[i, False] for i in tokenizer.control_names] if name == "random" else []
            tools = [declaration(load_tool(tool)) for tool in load_task("toolbox").tools] if name == "nano" else []
            _texts(suite, name, work, path, tokenizer, texts)
            with _server(path, work) as client:
                _conversations(suite, name, client, tokenizer, barred, tools)
                if name == "nano":
                    _answers(suite, client, folder)
    return suite.write()


def _random_model(folder: Path, texts: list[str]) -> Path:
    tokenizer = train_tokenizer(texts, VOCABULARY)
    write_base(folder, CausalLM(toy(tokenizer.size), seed=1))
    tokenizer.save(folder)
    return folder


def _texts(suite: Suite, model: str, work: Path, path: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    rng = random.Random(1)
    alphabet = "aZ é0 9\n\t'’\"=<|>._-漢и🙂 \u00a0"
    soup = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40))) for _ in range(2000)]
    single = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in range(tokenizer.size)]
    groups = {"whole files of the project": texts, "lines of the project's files": lines,
              "texts of single tokens": single, "random mixtures of signs": soup, "hand-made texts": NASTY}
    for name, group in groups.items():
        (work / "texts.json").write_text(json.dumps([{"text": text, "special": False} for text in group]))
        peer("llamacpp", "tokens", path, work / "texts.json", work / "ids.json")
        found = json.loads((work / "ids.json").read_text())
        differ = [text for text, ids in zip(group, found, strict=True) if tuple(ids) != tokenizer.encode_text(text)]
        suite.add(f"{model}: {name}, {len(group)}", "texts with other ids", len(differ), 0, note=_shown(differ))


def _shown(differ: list[str]) -> str:
    return "; ".join(ascii(text if len(text) < 50 else text[:49] + "…") for text in differ[:6]).replace("|", "\\|")


@contextmanager
def _server(path: Path, work: Path) -> Iterator[httpx.Client]:
    """llama-server on a free loopback port, ended by its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (work / "server.log").open("wb")
    process = subprocess.Popen(
        [str(LLAMA / "llama-server"), "-m", str(path), "--host", "127.0.0.1", "--port", str(port), "-c", "2048", "-np",
         "1", "-t", "1", "--no-webui", "--jinja", "--no-warmup"],
        stdout=log, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S) as client:
            _wait(client, process, work / "server.log")
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"llama-server did not start: {log.read_text(errors='replace')[-2000:]}")


def _conversations(suite: Suite, model: str, client: httpx.Client, tokenizer: Tokenizer,
                   barred: list[list[Any]], always: list[dict[str, Any]]) -> None:
    codec = ChatCodec(tokenizer)
    for name, messages in CONVERSATIONS.items():
        for thinking in (True, False):
            tools = always or (TOOLS if name == "tool call" else [])
            body: dict[str, Any] = {"messages": messages, "chat_template_kwargs": {"enable_thinking": thinking}}
            if tools:
                body["tools"] = tools
            prompt = client.post("/apply-template", json=body).raise_for_status().json()["prompt"]
            tokenized = {"content": prompt, "add_special": False, "parse_special": True}
            ids = client.post("/tokenize", json=tokenized).raise_for_status().json()["tokens"]
            want = codec.prompt_ids(parse_messages(messages), ChatOptions(thinking=thinking, tools=tuple(tools)))
            mode = "thinking" if thinking else "no thinking"
            suite.add(f"{model}: prompt of a conversation: {name}, {mode}", "ids that differ from our codec's",
                      sum(a != b for a, b in zip(ids, want, strict=False)) + abs(len(ids) - len(want)), 0,
                      note=f"{len(want)} ids")
            answer = client.post("/v1/chat/completions", json=body | {
                "max_tokens": 64 if always else 16, "seed": 1, "logit_bias": barred}).raise_for_status()
            usage = answer.json()["usage"]
            suite.add(f"{model}: /v1/chat/completions: {name}, {mode}", "prompt tokens counted less ours",
                      abs(usage["prompt_tokens"] - len(want)), 0,
                      note=f"{usage['completion_tokens']} tokens generated")


def _answers(suite: Suite, client: httpx.Client, folder: Path) -> None:
    """Whole turns to test requests of the toolbox, greedy, by the server and by our model."""
    codec, model, task = ChatCodec(Tokenizer.load(folder)), BaseStore.open(folder).model(), load_task("toolbox")
    scaffold = Scaffold(codec, [load_tool(name) for name in task.tools], declare=task.declare_tools)
    begin = codec.encode(codec.generation_prefix(thinking=True))
    declared = [declaration(load_tool(name)) for name in task.tools]
    differ, calls, answered = 0, 0, 0
    for index in range(QUESTIONS):
        prompt = [*scaffold.prompt(task.make(Split.TEST, index, 1)), *begin]
        reply = client.post("/completion", json={"prompt": prompt, "temperature": 0, "n_predict": ANSWER_TOKENS,
                                                 "return_tokens": True}).raise_for_status().json()
        ours = _greedy(model, prompt, codec.stop_ids)
        theirs = [i for i in reply["tokens"] if i not in codec.stop_ids]
        differ += ours != theirs
        parser = codec.parser()
        parser.push(theirs)
        parser.finish()
        calls += bool(parser.message.tool_calls)
        wanted = task.make(Split.TEST, index, 1)
        body = {"messages": list(wanted.messages), "tools": declared, "temperature": 0, "max_tokens": 256}
        message = client.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]["message"]
        found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
        request = wanted.metadata["request"]
        answered += found == ([(request.tool, dict(request.arguments))] if request.tool else [])
    note = (f"{calls} of them call a tool; asked through /v1/chat/completions with the tools declared, {answered} get "
            "the right call, or none, in OpenAI's form")
    suite.add(f"nano: greedy answers to {QUESTIONS} requests of the toolbox", "answers with other ids than ours",
              differ, 0, note=note)


def _greedy(model: CausalLM, prompt: list[int], stop: tuple[int, ...]) -> list[int]:
    past, new, ids = Past(model.config.text_config, 1), prompt, []
    while len(ids) < ANSWER_TOKENS:
        logits = model.go_on(torch.tensor(new), torch.tensor([len(new)]), past)
        new = [int(logits[-1].argmax())]
        if new[0] in stop:
            break
        ids += new
    return ids


if __name__ == "__main__":
    raise SystemExit(not main())
