"""A tokenizer of another model is refused before it can spoil anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import ConfigError
from tidemill.model.chat import (
    ChatCodec,
    ChatOptions,
    Tokenizer,
    build_tokenizer,
    check_tokenizer,
    load_tokenizer,
    parse_messages,
)

TOKENIZER = build_tokenizer(("Hi",))
C = TOKENIZER.control
IDS = {"vocab_size": TOKENIZER.size, "bos_token_id": C.bos, "eos_token_id": C.end_of_msg, "pad_token_id": C.pad}


def model_folder(folder: Path, **config: Any) -> Path:
    TOKENIZER.save(folder)
    (folder / "config.json").write_text(json.dumps({"text_config": IDS | config}))
    return folder


def edit(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Path:
    """Change the control tokens in tokenizer.json, merges and words untouched."""
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["added_tokens"] = change(spec["added_tokens"])
    file.write_text(json.dumps(spec))
    return folder


def renamed(old: str, new: str) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda tokens: [t | {"content": new} if t["content"] == old else t for t in tokens]


def test_the_models_own_tokenizer_is_taken(tmp_path: Path) -> None:
    assert load_tokenizer(model_folder(tmp_path)).digest == TOKENIZER.digest
    load_tokenizer(model_folder(tmp_path, eos_token_id=C.eos, bos_token_id=None, pad_token_id=None))


@pytest.mark.parametrize(("config", "message"), [
    ({"vocab_size": TOKENIZER.size + 16}, f"has {TOKENIZER.size} tokens, the model {TOKENIZER.size + 16}"),
    ({"bos_token_id": C.bos + 1}, "bos_token_id"), ({"eos_token_id": C.open}, "eos_token_id"),
    ({"pad_token_id": 0}, "pad_token_id"), ({"vocab_size": None}, "vocab_size is missing"),
])
def test_a_model_that_says_otherwise_refuses_it(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(model_folder(tmp_path, **config))


def test_a_sibling_that_cuts_markers_into_text_is_refused(tmp_path: Path) -> None:
    """Without the marker's id, one message of 12 ids would become a longer prompt of plain text."""
    prompt = ChatCodec(TOKENIZER).prompt_ids(parse_messages([{"role": "user", "content": "Hi"}]),
                                             ChatOptions(generation_prefix=False))
    assert len(prompt) == 12
    assert len(TOKENIZER.encode_text(TOKENIZER.decode(prompt))) > 30
    edit(model_folder(tmp_path), renamed("<|open|>", "<|im_user|>"))
    with pytest.raises(ConfigError, match=r"lacks the control tokens <\|open\|>"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("a", "b"), [("<|open|>", "<|close|>"), ("[UNK]", "[PAD]"), ("<|sep|>", "[start_header_id]")])
def test_a_sibling_whose_control_ids_are_others_is_refused(tmp_path: Path, a: str, b: str) -> None:
    folder = model_folder(tmp_path, pad_token_id=None)
    for old, new in ((a, "tmp"), (b, a), ("tmp", b)):
        edit(folder, renamed(old, new))
    with pytest.raises(ConfigError, match=r"expected .* as in K3"):
        load_tokenizer(folder)


def test_swapped_ends_are_found_by_the_models_ids() -> None:
    with pytest.raises(ConfigError, match=r"pad_token_id = 5, but the tokenizer has \d+ \[PAD\]"):
        check_tokenizer(TOKENIZER, vocab_size=TOKENIZER.size, pad_token_id=5)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_bad_configuration_is_refused(tmp_path: Path, text: str) -> None:
    model_folder(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_tokenizer(tmp_path)


def test_a_folder_with_a_rank_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"Convert tiktoken\.model"):
        Tokenizer.load(tmp_path)
