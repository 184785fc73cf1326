"""A byte-level BPE learnt from text, in `tokenizer.json` form: bytes, merges, then the control tokens of K3.

Learnt merges come first. Words that must be single tokens get merges of their own behind all learnt ones, so a learnt
merge never loses to them: text is cut as if they were not there, and the word alone still becomes one token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer

from tidemill.core.errors import ConfigError, InputError
from tidemill.model.chat.control import K3_IDS
from tidemill.model.chat.pattern import K3_PATTERN, LEARNING_PATTERN
from tidemill.model.chat.tokenizer import GRAMMAR_WORDS, Tokenizer, add_control_tokens, byte_letters, own_control_names

Pair = tuple[str, str]

MIN_COUNT = 2
"""A pair seen less often is not merged."""
MAX_TOKEN_BYTES = 32
"""Longest learnt token; keeps rulers and runs of spaces from filling the vocabulary."""


def train_tokenizer(texts: Iterable[str], size: int, *, words: Sequence[str] = ()) -> Tokenizer:
    """Learn a vocabulary of exactly `size` ids (a multiple of 16) from `texts`, read once and not kept.

    Ids: 256 bytes in order, learnt merges in order, tokens of GRAMMAR_WORDS and `words`, control tokens (reserved ones
    fill up what is left, at most a few). Text is cut by K3_PATTERN; no learnt token holds two digits. The same texts in
    any order give the same bytes of `tokenizer.json`.

    Raises ConfigError if a word cannot be a single token, or `size` is no multiple of 16, too small for the fixed
    tokens, or more than the texts can teach; InputError naming the text that holds a lone surrogate.
    """
    if size % 16:
        raise ConfigError(f"size = {size}: expected a multiple of 16", field="size")
    room = size - len(K3_IDS)
    wanted = [*dict.fromkeys((*GRAMMAR_WORDS, *words))]
    spelled = [_spell(word) for word in wanted]
    learnt = _learn(texts, max(room, 256))
    merges = learnt
    vocabulary, extra = _with_words(merges, spelled)
    if len(vocabulary) < room:
        raise ConfigError(
            f"size = {size}: these texts teach {len(learnt)} merges, enough for {len(vocabulary) + len(K3_IDS)} ids",
            field="size", remedy="Give more text or a smaller size.")
    while len(vocabulary) > room:
        fewer = len(merges) - (len(vocabulary) - room)
        if fewer < 0:
            least = len(_with_words([], spelled)[0]) + len(K3_IDS)
            raise ConfigError(f"size = {size}: bytes, fixed words and control tokens alone need {least}", field="size")
        merges = learnt[:fewer]
        vocabulary, extra = _with_words(merges, spelled)
    backend = bpe_backend(vocabulary, [*merges, *extra])
    add_control_tokens(backend, own_control_names(len(vocabulary), spare=room - len(vocabulary)))
    tokenizer = Tokenizer(backend)
    for word in wanted:
        if len(tokenizer.encode_text(word)) != 1:
            raise ConfigError(f"words = {word!r}: it cannot be a single token", field="words",
                              remedy="Use letters only or signs only, with at most one space in front.")
    return tokenizer


def bpe_backend(vocabulary: dict[str, int], merges: Sequence[Pair], *, whole_words: bool = False) -> BackendTokenizer:
    """The library's byte-level BPE with K3's pieces. `whole_words` takes a piece that is a token as that token,
    whatever its merges say."""
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=whole_words))
    backend.pre_tokenizer = _pieces(K3_PATTERN)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(pattern: str) -> pre_tokenizers.PreTokenizer:
    return cast("pre_tokenizers.PreTokenizer", pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]))


def _spell(word: str) -> str:
    letters = byte_letters()
    return "".join(letters[b] for b in word.encode())


def _learn(texts: Iterable[str], limit: int) -> list[Pair]:
    """At most `limit` - 256 merges, most frequent first; equal counts are ordered by the library's ids."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = _pieces(LEARNING_PATTERN)
    trainer = trainers.BpeTrainer(
        vocab_size=limit, min_frequency=MIN_COUNT, show_progress=False, initial_alphabet=byte_letters(),
        max_token_length=MAX_TOKEN_BYTES)
    backend.train_from_iterator(_checked(texts), trainer)
    spec: dict[str, Any] = json.loads(backend.to_str())
    return [(a, b) for a, b in spec["model"]["merges"]]


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for i, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"texts[{i}] holds a lone surrogate, which is not valid Unicode", field="texts") from e
        yield text


def _with_words(merges: Sequence[Pair], spelled: Sequence[str]) -> tuple[dict[str, int], list[Pair]]:
    """The vocabulary of bytes, merges and words, and the merges the words need behind `merges`."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    ranks: dict[Pair, int] = {}

    def learn(pair: Pair) -> None:
        ranks.setdefault(pair, len(ranks))
        vocabulary.setdefault("".join(pair), len(vocabulary))

    for pair in merges:
        learn(pair)
    extra: list[Pair] = []
    for word in spelled:
        parts = merge_pieces(list(word), ranks)
        while len(parts) > 1:
            pair = (parts[0], parts[1])
            learn(pair)
            extra.append(pair)
            parts = merge_pieces(parts, ranks)
    return vocabulary, extra


def merge_pieces(parts: list[str], ranks: dict[Pair, int]) -> list[str]:
    """Merge neighbours of lowest rank, leftmost first, until no pair has a rank."""
    parts = list(parts)
    while len(parts) > 1:
        rank, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(parts)))
        if rank == len(ranks):
            break
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return parts
