"""A tokenizer and the chat template in a GGUF file: the same tokenizer comes back, the template renders the codec's
prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tidemill.core.errors import ConfigError, ManifestError
from tidemill.model.base import write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.chat import ChatCodec, ChatOptions, Tokenizer, build_tokenizer, parse_messages, train_tokenizer
from tidemill.model.gguf import chat_template, export_gguf, import_gguf
from tidemill.model.gguf.container import GgufFile
from tidemill.model.presets import toy

TEXTS = ["the cat sat on the mat and the other cats sat on other mats", "def f(x):\n    return x + 1\n",
         "12 apples, 7 pears", "Hello World! HelloWorld", "naïve café, größer"] * 20
CORPUS = ["", " ", "the cat's mat", "  def f(x):\n\n    return 12345\n", "naïve größer ЖЖ 漢字 🙂",
          "<|open|>message<|sep|>", "\t\r\n x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words") / "model"
    tokenizer = train_tokenizer(TEXTS, 480)
    write_base(path, CausalLM(toy(480), seed=1))
    tokenizer.save(path)
    export_gguf(path, path.with_name("m.gguf"))
    return path


def test_the_same_tokenizer_comes_back(folder: Path, tmp_path: Path) -> None:
    import_gguf(folder.with_name("m.gguf"), tmp_path / "back")
    ours, back = Tokenizer.load(folder), Tokenizer.load(tmp_path / "back")
    assert back.digest == ours.digest
    assert back.control == ours.control
    assert [back.encode_text(text) for text in CORPUS] == [ours.encode_text(text) for text in CORPUS]


def test_tokens_have_the_types_llama_cpp_acts_on(folder: Path) -> None:
    metadata, tokenizer = GgufFile(folder.with_name("m.gguf")).metadata, Tokenizer.load(folder)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == 480 == len(set(tokens))
    assert {i for i, kind in enumerate(kinds) if kind == 3} == set(tokenizer.control_names)
    assert set(kinds) == {1, 3}
    control = tokenizer.control
    assert (metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.eot_token_id"]) == (control.end_of_msg,
                                                                                                  control.eos)
    assert metadata["tokenizer.ggml.pre"] == "kimi-k2"
    assert metadata["tokenizer.ggml.add_bos_token"] is False


def test_without_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    import_gguf(folder.with_name("m.gguf"), tmp_path / "back", tokenizer=False)
    assert not (tmp_path / "back/tokenizer.json").exists()


def test_a_tokenizer_that_has_no_name_in_gguf_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    write_base(tmp_path, CausalLM(toy(tokenizer.size)))
    tokenizer.save(tmp_path)
    with pytest.raises(ConfigError, match=r"K3's pattern.*without the tokenizer"):
        export_gguf(tmp_path, tmp_path / "m.gguf")


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    write_base(tmp_path, CausalLM(toy(464)))
    Tokenizer.load(folder).save(tmp_path)
    with pytest.raises(ConfigError, match="480 tokens, the model 464"):
        export_gguf(tmp_path, tmp_path / "m.gguf")


def test_whole_pieces_are_accepted_only_if_merges_make_them(folder: Path, tmp_path: Path) -> None:
    write_base(tmp_path, CausalLM(toy(480)))
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["ignore_merges"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    export_gguf(tmp_path, tmp_path / "m.gguf")
    spec["model"]["merges"] = spec["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match="cannot be merged"):
        export_gguf(tmp_path, tmp_path / "m.gguf")


def test_a_damaged_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    raw = folder.with_name("m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez"))
    with pytest.raises(ManifestError, match="tokenizer is malformed"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "back")


TOOL = {"type": "function", "function": {"name": "add", "description": "Größe <b> & \"x\"", "parameters": {
    "type": "object", "required": ["b", "a"], "Zed": {}, "additionalProperties": False,
    "properties": {"b": {"type": "number"}, "a": {"enum": [1, None, True, 2.5]}}}}}


def call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "the cat's mat"}],
    "system and developer": [{"role": "system", "content": "be brief"}, {"role": "developer", "content": "x"},
                             {"role": "user", "content": "  hello\n\n"}],
    "names to escape": [{"role": "user", "name": "A \"B\" & C", "content": "x"}],
    "text parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}]}],
    "reasoning": [
        {"role": "user", "content": "q"}, {"role": "assistant", "reasoning_content": "because", "content": "a"},
        {"role": "user", "content": "r"}, {"role": "assistant", "reasoning_content": " \n", "content": ""},
        {"role": "user", "content": "s"}],
    "tool calls and results out of order": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [
            call("add", {"a": 1, "b": -2.5, "c": "x \"y\"", "d": None, "e": [1, {"k": "ü"}], "f": {"z": True}}, "one"),
            call("strlen", {"s": "12"}, "two"), call("now", {}, "three")]},
        {"role": "tool", "tool_call_id": "two", "content": "2"},
        {"role": "tool", "tool_call_id": "three", "content": "t"},
        {"role": "tool", "tool_call_id": "one", "content": "-1.5"},
        {"role": "assistant", "reasoning": "done", "content": "it is"}],
    "a result without a call": [{"role": "user", "content": "q"},
                                {"role": "tool", "tool_call_id": "gone", "name": "add", "content": "3"},
                                {"role": "tool", "tool_call_id": "gone2", "name": "sub", "content": "4"}],
    "tools added later": [{"role": "system", "tools": [TOOL]}, {"role": "user", "content": "q"}],
}


def render(messages: list[dict[str, Any]], **variables: Any) -> str:
    """As the transformers library renders templates: its `tojson`, and an exception raised from inside."""
    def fail(reason: str) -> str:
        raise jinja2.TemplateError(reason)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, ensure_ascii=True: json.dumps(value, ensure_ascii=ensure_ascii)
    environment.globals["raise_exception"] = fail
    return environment.from_string(chat_template()).render(messages=messages, **variables)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize(("variables", "options"), [
    ({}, {}),
    ({"add_generation_prompt": True}, {"generation_prefix": True}),
    ({"add_generation_prompt": True, "enable_thinking": False}, {"generation_prefix": True, "thinking": False}),
    ({"add_generation_prompt": True, "tools": [TOOL], "reasoning_effort": "low", "tool_choice": "required"},
     {"generation_prefix": True, "tools": (TOOL,), "effort": "low", "tool_choice": "required"}),
    ({"tool_choice": "none"}, {"tool_choice": "none"}),
])
def test_the_template_renders_what_the_codec_renders(name: str, variables: dict[str, Any],
                                                     options: dict[str, Any]) -> None:
    codec = ChatCodec(build_tokenizer())
    parts = codec.render(parse_messages(CONVERSATIONS[name]), ChatOptions(**({"generation_prefix": False} | options)))
    want = "".join(s if isinstance(s, str) else s.value for part in parts for s in part)
    assert render(CONVERSATIONS[name], **variables) == want


def test_arguments_that_are_a_string_are_carried_raw() -> None:
    text = render([{"role": "assistant", "content": "", "tool_calls": [call("add", "{broken", "x")]}])
    assert '<|open|>json type="object"<|sep|>{broken<|close|>json<|sep|>' in text


def test_a_result_that_names_no_tool_and_an_image_raise() -> None:
    with pytest.raises(jinja2.TemplateError, match="names no tool"):
        render([{"role": "tool", "tool_call_id": "x", "content": "y"}])
    with pytest.raises(jinja2.TemplateError, match="text only"):
        render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
