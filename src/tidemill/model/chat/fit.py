"""Whether a tokenizer belongs to a model.

A sibling's tokenizer loads and round-trips: its merges are the same, only control ids differ or are missing, so that
markers are cut into text. Prompts then grow (32 ids in place of 12 for one message) and answers get worse, without an
error anywhere. So size and control ids are compared before anything is served or trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from tidemill.core.errors import ConfigError
from tidemill.model.chat.tokenizer import Tokenizer, Vocabulary

_REMEDY = "Use the tokenizer that came with the model."


def check_tokenizer(vocabulary: Vocabulary, *, vocab_size: int, bos_token_id: int | None = None,
                    eos_token_id: int | None = None, pad_token_id: int | None = None,
                    source: str = "config.json") -> None:
    """Raise ConfigError unless a model of `vocab_size` ids with these special ids (None: it does not say) has this
    vocabulary. A model may end its turns at either of the two ends."""
    if vocabulary.size != vocab_size:
        raise ConfigError(f"the tokenizer has {vocabulary.size} tokens, the model {vocab_size} ({source})",
                          field="tokenizer", remedy=_REMEDY)
    control = vocabulary.control
    for name, found, wanted in (
        ("bos_token_id", bos_token_id, (control.bos,)),
        ("eos_token_id", eos_token_id, (control.end_of_msg, control.eos)),
        ("pad_token_id", pad_token_id, (control.pad,)),
    ):
        if found is not None and found not in wanted:
            spelled = " or ".join(f"{i} {vocabulary.token_name(i)}" for i in wanted)
            raise ConfigError(f"{source}: {name} = {found}, but the tokenizer has {spelled}", field=name,
                              remedy=_REMEDY)
    first = control.bos
    order = (control.eos, control.end_of_msg, control.open, control.close, control.sep, control.unk, control.pad)
    expected = (*range(first + 1, first + 6), vocab_size - 2, vocab_size - 1)
    if order != expected:
        raise ConfigError(f"the tokenizer's control ids are {order} after {first}, expected {expected} as in K3",
                          field="tokenizer", remedy=_REMEDY)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder, checked against its config.json. Raises ConfigError."""
    tokenizer = Tokenizer.load(folder)
    file = folder / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {file}: {e}", field="tokenizer") from e
    text = data.get("text_config", data) if isinstance(data, dict) else None
    if not isinstance(text, dict) or not isinstance(text.get("vocab_size"), int):
        raise ConfigError(f"{file}: text_config.vocab_size is missing", field="vocab_size")
    fields = cast("dict[str, Any]", text)
    check_tokenizer(tokenizer, vocab_size=fields["vocab_size"], bos_token_id=fields.get("bos_token_id"),
                    eos_token_id=fields.get("eos_token_id"), pad_token_id=fields.get("pad_token_id"), source=str(file))
    return tokenizer
