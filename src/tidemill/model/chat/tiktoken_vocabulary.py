"""K3's own vocabulary from `tiktoken.model`, and the same vocabulary as `tokenizer.json`.

The file has one token a line: its bytes in base64, a space, its rank. Ranks are ids and the order of merging. 256
control ids follow. A file of another length is a sibling: its control ids follow its own tokens, and `check_tokenizer`
refuses it for a model that says otherwise.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import tiktoken
from tokenizers import Regex, pre_tokenizers

from tidemill.core.errors import ConfigError, InputError
from tidemill.model.chat.bpe import bpe_backend
from tidemill.model.chat.control import NUM_CONTROL, ControlIds, control_names
from tidemill.model.chat.pattern import CLASSES, K3_PATTERN
from tidemill.model.chat.tokenizer import Tokenizer, add_control_tokens, byte_letters, decode_ids

FILE_NAME = "tiktoken.model"
MAX_CHARS = 400_000
"""Longer text is encoded in blocks of so many characters ..."""
MAX_RUN = 25_000
"""... and a run of white space, or of anything else, in pieces of so many, as the released tokenizer does. Without it
the library's regular expression runs out of stack."""

_CLASS_BLOCK = 20_000
_RUNS = re.compile(r"\s+|\S+")


class TiktokenVocabulary:
    """A rank file as a Vocabulary. Immutable; safe to share between threads."""

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        """`ranks` are 0 to n - 1 and hold every single byte; `load` checks that."""
        self._encoding = tiktoken.Encoding("tidemill", pat_str=K3_PATTERN, mergeable_ranks=dict(ranks),
                                           special_tokens={})
        self._names = control_names(len(ranks))
        self.control = ControlIds.from_names({name: i for i, name in self._names.items()})
        self.size = len(ranks) + NUM_CONTROL
        self._bytes: list[bytes] = [b""] * self.size
        for token, rank in ranks.items():
            self._bytes[rank] = token

    @classmethod
    def load(cls, path: Path, *, size: int | None = None) -> TiktokenVocabulary:
        """Read `tiktoken.model` or a folder that holds one. `size` is the number of ids expected, control ids included.

        Raises ConfigError naming file and line.
        """
        file = path / FILE_NAME if path.is_dir() else path
        ranks = read_ranks(file)
        if size is not None and len(ranks) + NUM_CONTROL != size:
            raise ConfigError(
                f"{file}: {len(ranks)} tokens and {NUM_CONTROL} control ids make {len(ranks) + NUM_CONTROL}, expected "
                f"{size}", field="tokenizer", remedy="Use the file that came with the model; this one is another's or "
                "cut off.")
        return cls(ranks)

    @property
    def control_names(self) -> dict[int, str]:
        """Every control id and its spelling."""
        return dict(self._names)

    @property
    def ranks(self) -> dict[bytes, int]:
        """Bytes and id of every token that is no control token."""
        return {token: i for i, token in enumerate(self._bytes) if token}

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; control tokens cannot come out of it. Raises InputError for lone surrogates."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            # The library would replace them in silence.
            raise InputError("text holds a lone surrogate, which is not valid Unicode", field="text") from e
        return [i for block in _blocks(text) for i in self._encoding.encode_ordinary(block)]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def token_name(self, token_id: int) -> str:
        return self._names.get(token_id, "")

    def decode(self, ids: Iterable[int], *, control: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. `control` keeps the spelling of control tokens."""
        return decode_ids(self, ids, control=control)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Token bytes and ranks of a rank file. Raises ConfigError naming the line of whatever is wrong with it."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as e:
        raise ConfigError(f"cannot read the tokenizer {file}: {e}", field="tokenizer") from e
    if lines[-1] == b"":
        lines.pop()
    ranks: dict[bytes, int] = {}
    seen: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        token, rank = _parse_line(line, f"{file}:{number}")
        if token in ranks:
            _refuse(f"{file}:{number}", f"the token {token!r} stands in line {seen[ranks[token]]} too")
        if rank in seen:
            _refuse(f"{file}:{number}", f"rank {rank} stands in line {seen[rank]} too")
        if rank >= len(lines):
            _refuse(f"{file}:{number}", f"rank {rank} in a file of {len(lines)} tokens: a rank is missing")
        ranks[token] = rank
        seen[rank] = number
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        _refuse(str(file), f"no token for the byte 0x{missing[0]:02x} ({len(missing)} of 256 missing)")
    return ranks


def _parse_line(line: bytes, at: str) -> tuple[bytes, int]:
    coded, space, rank = line.partition(b" ")
    if not space or not rank.isdigit():
        _refuse(at, "expected a token in base64, a space and its rank")
    try:
        token = base64.b64decode(coded, validate=True)
    except binascii.Error as e:
        raise ConfigError(f"{at}: {coded[:40]!r} is not base64: {e}", field="tokenizer") from e
    if not token:
        _refuse(at, "an empty token")
    return token, int(rank)


def _refuse(at: str, problem: str) -> None:
    raise ConfigError(f"{at}: {problem}", field="tokenizer", remedy="Get the file again.")


def _blocks(text: str) -> Iterator[str]:
    for first in range(0, len(text), MAX_CHARS):
        block = text[first : first + MAX_CHARS]
        start = 0
        if len(block) > MAX_RUN:
            for run in _RUNS.finditer(block):
                for at in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                    yield block[start:at]
                    start = at
        yield block[start:]


# -- as tokenizer.json -------------------------------------------------------------------------------------------------


def convert_tiktoken(vocabulary: TiktokenVocabulary) -> Tokenizer:
    """The same vocabulary in `tokenizer.json` form, ids equal on every text within MAX_CHARS and MAX_RUN.
    Takes about half a minute for the released file; save the result.

    tiktoken merges whichever neighbours make a known token, lowest rank first; the other form lists merges by their
    two parts. One pair a token is enough: as long as no merge crosses its edges, a stretch of text is merged as if it
    stood alone, so the two parts a token is last made of are always those found by merging the token alone. A token
    that merging never reaches counts only when a piece of text is that token, for which the form has a switch.

    Raises ConfigError if the two libraries know different Unicode versions, as they would cut text differently.
    """
    _check_classes()
    ranks = vocabulary.ranks
    letters = byte_letters()
    spelled = {token: "".join(letters[b] for b in token) for token in ranks}
    pairs: list[tuple[str, str]] = []
    unreached = False
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) == 1:
            continue
        parts = _last_parts(token, ranks)
        if parts is None:
            unreached = True
        else:
            pairs.append((spelled[parts[0]], spelled[parts[1]]))
    backend = bpe_backend({spelled[t]: i for t, i in ranks.items()}, pairs, whole_words=unreached)
    add_control_tokens(backend, list(vocabulary.control_names.values()))
    return Tokenizer(backend)


def _last_parts(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts merging ends with before `token` is whole; None if it never becomes whole."""
    parts = [token[i : i + 1] for i in range(len(token))]
    none = len(ranks)
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], none), i) for i in range(len(parts) - 1))
        if rank == none:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


@cache
def _check_classes() -> None:
    """Raise ConfigError unless both libraries sort every character into the same classes of the pattern."""
    # Beyond these ranges Unicode has assigned nothing but private use.
    assigned = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000))))
    blocks = [assigned[i : i + _CLASS_BLOCK] for i in range(0, len(assigned), _CLASS_BLOCK)]
    single = {bytes([b]): b for b in range(256)}
    for name in CLASSES:
        cut = tiktoken.Encoding("class", pat_str=f"{name}+", mergeable_ranks=single, special_tokens={})
        split = pre_tokenizers.Split(Regex(f"{name}+"), "removed", invert=True)
        for block in blocks:
            ours = bytes(cut.encode_ordinary(block)).decode()
            theirs = "".join(run for run, _ in split.pre_tokenize_str(block))
            if ours != theirs:
                odd = min(set(ours) ^ set(theirs))
                raise ConfigError(
                    f"tiktoken and tokenizers disagree whether U+{ord(odd):04X} is in {name}", field="tokenizer",
                    remedy="Install releases of the two that know the same Unicode version (constraints.txt).")
