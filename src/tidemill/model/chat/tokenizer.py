"""Byte-level BPE over the `tokenizers` library: text to ids and back, with the control tokens out of reach of any text.

A vocabulary of ours is 256 bytes, whole words that must be single tokens, then the control tokens. It is built from a
word list by code, so the same list gives the same file. Words are matched whole (`ignore_merges`), which needs no merge
tokens and can never be undone by another word's merges; everything else falls back to bytes, so any text round-trips.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from tidemill.core.digests import digest_json
from tidemill.core.errors import ConfigError, InputError
from tidemill.core.files import write_atomic, write_json
from tidemill.model.chat.control import BOS, END_OF_MSG, K3_IDS, NOT_SPECIAL, PAD, UNK, ControlIds, reserved_name
from tidemill.model.chat.template import chat_template
from tidemill.model.hub import tokenizer_auto_map, write_tokenizer_module

GRAMMAR_WORDS = (
    "message", "think", "response", "tools", "call", "argument", "json", '="',
    " role", " name", " type", " tool", " index", " key",
    "system", "user", "assistant", "tool", "declare", "thinking", "effort", "choice", "format",
    "string", "number", "boolean", "null", "object", "array", "true", "false",
    "python", "sh", "code", "command", "print", "name", "type", "key", "index",
    "description", "parameters", "properties", "required", "function",
)
"""Single tokens of every vocabulary built here: what the message grammar and tool declarations are made of."""

_CACHE_CHARS = 48
_CACHE_ENTRIES = 4096


class Vocabulary(Protocol):
    """What the chat codec needs of a tokenizer."""

    @property
    def control(self) -> ControlIds: ...

    @property
    def size(self) -> int:
        """Number of ids; logits have this width."""
        ...

    def encode_text(self, text: str) -> Sequence[int]:
        """Ids of plain text. Spellings of control tokens are text like any other and never become control ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes (perhaps part of a character) a token stands for; empty for control tokens."""
        ...

    def token_name(self, token_id: int) -> str:
        """The spelling of a control token, empty for any other."""
        ...


class Tokenizer:
    """A vocabulary in Hugging Face's `tokenizer.json` form. Immutable; safe to share between threads."""

    def __init__(self, backend: BackendTokenizer) -> None:
        """Raises ConfigError if control tokens are missing or the model is not byte-level."""
        self._backend = backend
        spec: dict[str, Any] = json.loads(backend.to_str())
        added = cast("list[dict[str, Any]]", spec["added_tokens"])
        self._names: dict[int, str] = {int(t["id"]): str(t["content"]) for t in added}
        self.control = ControlIds.from_names({name: i for i, name in self._names.items()})
        vocabulary = cast("dict[str, int]", spec["model"]["vocab"])
        self.size = 1 + max(max(vocabulary.values()), max(self._names))
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}
        self._bytes: list[bytes] = [b""] * self.size
        for token, token_id in vocabulary.items():
            if token_id in self._names:
                continue
            try:
                self._bytes[token_id] = bytes(letters[c] for c in token)
            except KeyError as e:
                raise ConfigError(f"tokenizer: token {token!r} is not byte-level", field="tokenizer") from e
        # The library matches added tokens inside any text, special or not: plain text goes through a twin without them.
        self._plain = BackendTokenizer.from_str(json.dumps(spec | {"added_tokens": [], "post_processor": None}))
        self._cache: dict[str, tuple[int, ...]] = {}

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read `tokenizer.json` or a folder that holds one. Raises ConfigError."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            remedy = "Convert tiktoken.model with convert_tiktoken first." if (path / "tiktoken.model").exists() else ""
            raise ConfigError(f"cannot read the tokenizer {file}: {e}", field="tokenizer", remedy=remedy) from e
        try:
            backend = BackendTokenizer.from_str(text)
        except Exception as e:  # the library raises bare Exception for every malformed file
            raise ConfigError(f"{file} is not a tokenizer.json: {e}", field="tokenizer") from e
        return cls(backend)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and the chat template (each whole or not at all), and what
        Hugging Face's AutoTokenizer looks for (tidemill.model.hub)."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "tokenizer.json", self._backend.to_str(pretty=True).encode())
        write_json(folder / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": END_OF_MSG, "pad_token": PAD,
            "unk_token": UNK, "add_bos_token": False, "clean_up_tokenization_spaces": False,
            "padding_side": "left",
            "auto_map": tokenizer_auto_map(),
        })
        write_tokenizer_module(folder)
        write_atomic(folder / "chat_template.jinja", chat_template().encode())

    @property
    def backend(self) -> BackendTokenizer:
        """The library's object. Changing it changes nothing here."""
        return BackendTokenizer.from_str(self._backend.to_str())

    @property
    def digest(self) -> str:
        """Digest of the content of `tokenizer.json`, independent of its layout."""
        return digest_json(json.loads(self._backend.to_str()))

    @property
    def control_names(self) -> dict[int, str]:
        """Every control id and its spelling."""
        return dict(self._names)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of plain text; control tokens cannot come out of it. Raises InputError for lone surrogates."""
        found = self._cache.get(text)
        if found is not None:
            return found
        try:
            ids = tuple(self._plain.encode(text, add_special_tokens=False).ids)
        except (UnicodeEncodeError, TypeError) as e:
            raise InputError("text holds a lone surrogate, which is not valid Unicode", field="text") from e
        if len(text) <= _CACHE_CHARS and len(self._cache) < _CACHE_ENTRIES:
            self._cache[text] = ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def token_name(self, token_id: int) -> str:
        return self._names.get(token_id, "")

    def decode(self, ids: Iterable[int], *, control: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. `control` keeps the spelling of control tokens."""
        return decode_ids(self, ids, control=control)


def build_tokenizer(words: Iterable[str] = (), *, multiple: int = 16) -> Tokenizer:
    """A vocabulary of all bytes, GRAMMAR_WORDS and `words` as single tokens, padded to a multiple, control tokens last.

    A word may begin with a space; letters and other signs cannot be mixed in one word (text is cut between them before
    words are looked up). Raises ConfigError naming a word that would not be a single token.
    """
    letters = byte_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    wanted = list(dict.fromkeys((*GRAMMAR_WORDS, *words)))
    for word in wanted:
        token = "".join(letters[b] for b in word.encode())
        vocabulary.setdefault(token, len(vocabulary))
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    spare = -(len(vocabulary) + len(K3_IDS)) % multiple
    add_control_tokens(backend, own_control_names(len(vocabulary), spare=spare))
    tokenizer = Tokenizer(backend)
    for word in wanted:
        if len(tokenizer.encode_text(word)) != 1:
            raise ConfigError(
                f"words = {word!r}: it cannot be a single token", field="words",
                remedy="Use letters only, one digit, or signs only, with at most one space in front.",
            )
    return tokenizer


def own_control_names(first: int, *, spare: int) -> list[str]:
    """The named control tokens from id `first`, `spare` reserved ones before the last two."""
    *names, unknown, pad = K3_IDS
    return [*names, *(reserved_name(first + len(names) + i) for i in range(spare)), unknown, pad]


def add_control_tokens(backend: BackendTokenizer, names: Iterable[str]) -> None:
    """Give `backend` control tokens behind its other ids."""
    backend.add_tokens([AddedToken(name, special=name not in NOT_SPECIAL, normalized=False) for name in names])


def decode_ids(vocabulary: Vocabulary, ids: Iterable[int], *, control: bool) -> str:
    """Text of ids; bytes that are no UTF-8 become U+FFFD. `control` keeps the spelling of control tokens."""
    parts = bytearray()
    for token_id in ids:
        parts += vocabulary.token_bytes(token_id) or (vocabulary.token_name(token_id).encode() if control else b"")
    return parts.decode("utf-8", "replace")


def byte_letters() -> list[str]:
    """The printable letter byte-level BPE writes for each byte: itself if printable, else the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters: list[str] = []
    extra = 0x100
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(extra))
            extra += 1
    return letters
