"""Control tokens: their names in the released K3 vocabulary, and their ids in any vocabulary.

K3's vocabulary ends with 256 control ids that start at 163584. Our own small vocabularies end with the sixteen that
have a name, in the same order. Source: K3 technical report and the released tokenizer's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.core.errors import ConfigError

BOS, EOS = "[BOS]", "[EOS]"
END_OF_MSG = "<|end_of_msg|>"
OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
UNK, PAD = "[UNK]", "[PAD]"

K3_IDS: Mapping[str, int] = {
    BOS: 163_584, EOS: 163_585, END_OF_MSG: 163_586, OPEN: 163_587, CLOSE: 163_588, SEP: 163_589,
    "[start_header_id]": 163_590, "[end_header_id]": 163_591, "[EOT]": 163_593, "<|media_begin|>": 163_602,
    "<|media_content|>": 163_603, "<|media_end|>": 163_604, "<|media_pad|>": 163_605, "<osagent_mode>": 163_649,
    UNK: 163_838, PAD: 163_839,
}
"""Named control tokens of the released vocabulary, in order of id."""

def reserved_name(token_id: int) -> str:
    """Spelling of a control id without a name."""
    return f"<|reserved_token_{token_id}|>"


K3_BASE = 163_584
"""Tokens of the released vocabulary before its control ids."""
NUM_CONTROL = 256


def control_names(base: int) -> dict[int, str]:
    """The 256 control ids behind `base` other tokens, by id: K3's names at K3's places, reserved names between."""
    named = {token_id - K3_BASE: name for name, token_id in K3_IDS.items()}
    return {base + i: named.get(i) or reserved_name(base + i) for i in range(NUM_CONTROL)}


NOT_SPECIAL = frozenset((OPEN, CLOSE, SEP))
"""Kept when a decoder is told to skip special tokens; the other names are special."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlIds:
    """Ids of the control tokens the codec works with."""

    bos: int
    eos: int
    end_of_msg: int
    open: int
    close: int
    sep: int
    unk: int
    pad: int

    @classmethod
    def from_names(cls, ids: Mapping[str, int]) -> ControlIds:
        """Pick them from a name -> id table. Raises ConfigError naming what is missing."""
        missing = [name for name in (BOS, EOS, END_OF_MSG, OPEN, CLOSE, SEP, UNK, PAD) if name not in ids]
        if missing:
            raise ConfigError(f"the vocabulary lacks the control tokens {', '.join(missing)}", field="tokenizer")
        return cls(bos=ids[BOS], eos=ids[EOS], end_of_msg=ids[END_OF_MSG], open=ids[OPEN], close=ids[CLOSE],
                   sep=ids[SEP], unk=ids[UNK], pad=ids[PAD])


K3_CONTROL = ControlIds.from_names(K3_IDS)
