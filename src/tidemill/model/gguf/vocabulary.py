"""A tokenizer as GGUF metadata and back, and the chat template that goes with it.

ggml's model `gpt2` is byte-level BPE by merges. How text is cut before merging is not in the file but named, by
`tokenizer.ggml.pre`: `kimi-k2` is K3's pattern. llama.cpp's cutter of that name keeps lower and upper case together and
takes a combining mark for a sign; docs/oracles.md counts what that changes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from tidemill.core.errors import ConfigError, ManifestError
from tidemill.model.chat import Tokenizer, load_tokenizer
from tidemill.model.chat.bpe import Pair, bpe_backend, merge_pieces
from tidemill.model.chat.control import BOS, END_OF_MSG, EOS, NOT_SPECIAL, PAD, UNK
from tidemill.model.chat.template import chat_template
from tidemill.model.config import TextConfig
from tidemill.model.gguf.container import GgufFile, Value

FILE = "tokenizer.json"
_NORMAL, _CONTROL = 1, 3
_KEYS = "tokenizer.ggml."
_PIECES = "kimi-k2"


def to_metadata(folder: Path) -> dict[str, Value]:
    """The keys of folder's tokenizer and the chat template. ConfigError if it is not the model's, or cuts or merges
    text in a way llama.cpp has no name for."""
    tokenizer = load_tokenizer(folder)
    spec: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if spec["pre_tokenizer"] != _spec_of({}, [])["pre_tokenizer"]:
        raise ConfigError(f"{folder / FILE} does not cut text by K3's pattern, the only one GGUF can name",
                          field="tokenizer", remedy="Export without the tokenizer, or learn one by K3's pattern.")
    merges = [_pair(merge) for merge in spec["model"]["merges"]]
    control = tokenizer.control_names
    names = {i: text for text, i in spec["model"]["vocab"].items()} | control
    if spec["model"].get("ignore_merges"):
        _check_merged(folder, merges, [text for i, text in names.items() if i not in control])
    ids = {name: i for i, name in control.items()}
    return {
        _KEYS + "model": "gpt2", _KEYS + "pre": _PIECES, _KEYS + "tokens": [names[i] for i in range(tokenizer.size)],
        _KEYS + "token_type": [_CONTROL if i in control else _NORMAL for i in range(tokenizer.size)],
        _KEYS + "merges": [" ".join(pair) for pair in merges],
        _KEYS + "bos_token_id": ids[BOS], _KEYS + "eos_token_id": ids[END_OF_MSG], _KEYS + "eot_token_id": ids[EOS],
        _KEYS + "padding_token_id": ids[PAD], _KEYS + "unknown_token_id": ids[UNK],
        _KEYS + "add_bos_token": False, _KEYS + "add_space_prefix": False,
        "tokenizer.chat_template": chat_template(),
    }


def no_tokenizer(c: TextConfig) -> dict[str, Value]:
    """Keys of a file without a vocabulary: tokens are ids."""
    ids = {"bos_token_id": c.bos_token_id, "eos_token_id": c.eos_token_id, "padding_token_id": c.pad_token_id}
    return {_KEYS + "model": "none", **{_KEYS + name: i for name, i in ids.items() if i is not None}}


def from_metadata(file: GgufFile) -> Tokenizer | None:
    """The tokenizer of a file, or None if it has none. ManifestError if it is of another kind or malformed."""
    metadata = file.metadata
    kind, pieces = metadata.get(_KEYS + "model", "none"), metadata.get(_KEYS + "pre")
    if kind == "none":
        return None
    if (kind, pieces) != ("gpt2", _PIECES):
        raise ManifestError(f"{file.path} has a tokenizer of model {kind!r} with pieces {pieces!r}, expected 'gpt2' "
                            f"with {_PIECES!r}", remedy="Import it without its tokenizer.")
    try:
        listed = list(zip(metadata[_KEYS + "tokens"], metadata[_KEYS + "token_type"], strict=True))
        merges = [_pair(merge) for merge in metadata[_KEYS + "merges"]]
    except (KeyError, TypeError, ValueError) as e:
        raise ManifestError(f"{file.path}: its tokenizer is malformed: {e!r}") from e
    vocabulary = {text: i for i, (text, kind) in enumerate(listed) if kind == _NORMAL}
    spec = _spec_of(vocabulary, merges)
    spec["added_tokens"] = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": text not in NOT_SPECIAL} for i, (text, kind) in enumerate(listed) if kind == _CONTROL]
    try:
        return Tokenizer(BackendTokenizer.from_str(json.dumps(spec)))
    except Exception as e:  # the library raises bare Exception for a vocabulary it refuses
        raise ManifestError(f"{file.path}: its tokenizer is malformed: {e}") from e


def _spec_of(vocabulary: dict[str, int], merges: list[Pair]) -> dict[str, Any]:
    return json.loads(bpe_backend(vocabulary, merges).to_str())


def _pair(merge: str | list[str]) -> Pair:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _check_merged(folder: Path, merges: list[Pair], tokens: list[str]) -> None:
    """Whether merges alone make every token, so that taking pieces whole changes nothing."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    for token in tokens:
        if len(merge_pieces(list(token), ranks)) > 1:
            raise ConfigError(f"{folder / FILE}: the token {token!r} is taken whole and cannot be merged, which GGUF "
                              "cannot say", field="tokenizer", remedy="Export without the tokenizer.")
