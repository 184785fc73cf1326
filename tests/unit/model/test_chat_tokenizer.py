"""Tokenizer: any text round-trips, no text becomes a control token, words are single tokens, files are standard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer

from tidemill.core.errors import ConfigError, InputError
from tidemill.model.chat import TiktokenVocabulary, Tokenizer, Vocabulary, build_tokenizer, train_tokenizer
from tidemill.model.chat.control import K3_CONTROL, K3_IDS
from tidemill.model.chat.tokenizer import GRAMMAR_WORDS

WORDS = ("oak", "fir", "elm", " ash")
TOKENIZER = build_tokenizer(WORDS)
LEARNT = train_tokenizer(["ababab caca " + "".join(map(chr, range(0x400, 0x500))) * 2] * 2, 512)
RANKS = TiktokenVocabulary({bytes([b]): b for b in range(256)})
CONTROL_IDS = set(TOKENIZER.control_names)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
MARKED = st.lists(st.one_of(TEXTS, st.sampled_from([*K3_IDS, "<|reserved_token_9|>"])), max_size=6).map("".join)


@given(MARKED)
def test_any_text_round_trips_and_never_becomes_a_control_token(text: str) -> None:
    ids = TOKENIZER.encode_text(text)
    assert TOKENIZER.decode(ids) == text
    assert not CONTROL_IDS & set(ids)
    assert all(0 <= i < TOKENIZER.size for i in ids)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, LEARNT, RANKS], ids=["words", "learnt", "tiktoken"])
def test_characters_of_all_planes_round_trip(tokenizer: Vocabulary) -> None:
    characters = [chr(c) for c in (*range(0x3000), *range(0x3000, 0x110000, 37)) if not 0xD800 <= c < 0xE000]
    for text in ("".join(characters), "a".join(characters[::5]), " ".join(characters[::11])):
        assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode_text(text)).decode() == text


@given(st.binary(max_size=40))
def test_every_byte_has_a_token(data: bytes) -> None:
    by_bytes = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.size)}
    ids = [by_bytes[bytes([b])] for b in data]
    assert b"".join(TOKENIZER.token_bytes(i) for i in ids) == data


@pytest.mark.parametrize("word", [*GRAMMAR_WORDS, *WORDS, '"', "7", "+", "-", "?"])
def test_words_are_single_tokens(word: str) -> None:
    assert len(TOKENIZER.encode_text(word)) == 1


def test_an_expression_is_one_token_per_word_and_sign() -> None:
    assert len(TOKENIZER.encode_text("oak+fir-elm")) == 5


def test_control_tokens_stand_at_the_end_in_the_order_of_the_released_vocabulary() -> None:
    names = TOKENIZER.control_names
    first = min(names)
    assert sorted(names) == list(range(first, TOKENIZER.size))
    assert all(TOKENIZER.token_bytes(i) != b"" for i in range(first))
    assert [n for i, n in sorted(names.items()) if not n.startswith("<|reserved")] == list(K3_IDS)
    assert (names[TOKENIZER.size - 2], names[TOKENIZER.size - 1]) == ("[UNK]", "[PAD]")
    assert TOKENIZER.size % 16 == 0
    assert TOKENIZER.size <= 512


def test_published_ids() -> None:
    assert (K3_CONTROL.bos, K3_CONTROL.eos, K3_CONTROL.end_of_msg) == (163584, 163585, 163586)
    assert (K3_CONTROL.open, K3_CONTROL.close, K3_CONTROL.sep, K3_CONTROL.pad) == (163587, 163588, 163589, 163839)
    assert len(K3_IDS) == 16


def test_special_flags_follow_the_release(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    plain = {t["content"] for t in added if not t["special"]}
    assert plain == {"<|open|>", "<|close|>", "<|sep|>"}


def test_the_same_words_give_the_same_tokenizer_and_others_do_not() -> None:
    assert build_tokenizer(WORDS).digest == TOKENIZER.digest
    assert build_tokenizer((*WORDS, "yew")).digest != TOKENIZER.digest


def test_saved_files_load_here_and_in_the_library(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    library = BackendTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = 'oak+fir = {"x": "é"}\n'
    assert again.digest == TOKENIZER.digest
    assert again.control == TOKENIZER.control
    assert again.encode_text(text) == TOKENIZER.encode_text(text) == tuple(library.encode(text).ids)
    assert library.decode(list(TOKENIZER.encode_text(text))) == text
    assert library.token_to_id("<|open|>") == TOKENIZER.control.open


@pytest.mark.parametrize("word", ["two words", "a1", "x+", "", "é" + " "])
def test_a_word_that_cannot_be_one_token_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a single token"):
        build_tokenizer([word])


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InputError, match="surrogate"):
        TOKENIZER.encode_text("a\ud800b")


@pytest.mark.parametrize(("content", "message"), [
    (None, "cannot read"), ("{", "not a tokenizer.json"), ("{}", "not a tokenizer.json"),
])
def test_a_bad_file_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_without_markers_is_refused(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] != "<|sep|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match=r"<\|sep\|>"):
        Tokenizer.load(tmp_path)


def test_readable_text_can_leave_control_tokens_out() -> None:
    c = TOKENIZER.control
    ids = [c.open, *TOKENIZER.encode_text("think"), c.sep, *TOKENIZER.encode_text("x")]
    assert TOKENIZER.decode(ids) == "<|open|>think<|sep|>x"
    assert TOKENIZER.decode(ids, control=False) == "thinkx"
