"""A learnt vocabulary: deterministic, exact size, fixed words whole, single digits, control tokens as everywhere."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer

from tidemill.core.errors import ConfigError, InputError
from tidemill.model.chat import Tokenizer, train_tokenizer
from tidemill.model.chat.bpe import MAX_TOKEN_BYTES, merge_pieces
from tidemill.model.chat.control import K3_IDS
from tidemill.model.chat.tokenizer import GRAMMAR_WORDS, byte_letters


def _texts(count: int = 300) -> list[str]:
    rng = random.Random(5)
    syllables = ["ka", "lo", "mi", "ret", "sun", "tor", "vel", "wey"]
    words = ["oak", "maple", "messenger", "thinking", "naïve", "森林", "can't", "x_1", "2026", "="]
    rare = ["".join(rng.choices(syllables, k=3)) for _ in range(150)]
    lines = [" ".join(rng.choice(rng.choice((words, rare))) for _ in range(30)) for _ in range(count)]
    return [line + "\n" * rng.randint(1, 3) for line in lines]


TEXTS = _texts()
WORDS = ("larch", " yew", "<>")
TOKENIZER = train_tokenizer(TEXTS, 640, words=WORDS)


def _merges(tokenizer: Tokenizer, folder: Path) -> list[list[str]]:
    tokenizer.save(folder)
    return json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]


def test_the_size_is_exact_and_control_tokens_come_last() -> None:
    names = TOKENIZER.control_names
    assert TOKENIZER.size == 640
    assert sorted(names) == list(range(min(names), 640))
    assert [n for _, n in sorted(names.items()) if not n.startswith("<|reserved")] == list(K3_IDS)
    assert [TOKENIZER.token_bytes(b) for b in range(256)] == [bytes([b]) for b in range(256)]


@pytest.mark.parametrize("word", [*GRAMMAR_WORDS, *WORDS, '"', "7"])
def test_fixed_words_are_single_tokens(word: str) -> None:
    assert len(TOKENIZER.encode_text(word)) == 1


def test_frequent_words_are_learnt() -> None:
    assert len(TOKENIZER.encode_text(" maple maple")) == 2


def test_digits_stay_single() -> None:
    assert [TOKENIZER.token_bytes(i) for i in TOKENIZER.encode_text("2026")] == [b"2", b"0", b"2", b"6"]
    assert all(sum(48 <= b <= 57 for b in TOKENIZER.token_bytes(i)) <= 1 for i in range(TOKENIZER.size))


def test_fixed_words_do_not_change_how_other_text_is_cut(tmp_path: Path) -> None:
    """Merges of words stand behind all learnt ones, and the library applies merges in that order."""
    merges = [tuple(m) for m in _merges(TOKENIZER, tmp_path)]
    letters = byte_letters()
    ranks = {pair: i for i, pair in enumerate(merges)}
    for piece in ("messenger", " maple", "森林", " can't", "thinking", "responsibility", "larches"):
        expected = merge_pieces([letters[b] for b in piece.encode()], ranks)
        found = [TOKENIZER.token_bytes(i) for i in TOKENIZER.encode_text(piece)]
        assert ["".join(letters[b] for b in t) for t in found] == expected
    learnt = merges.index(next(m for m in merges if "".join(m) == "larch"))
    assert learnt > merges.index(next(m for m in merges if "".join(m).endswith("maple")))


def test_the_same_texts_in_any_order_and_process_give_the_same_file(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "a")
    train_tokenizer(reversed(TEXTS), 640, words=WORDS).save(tmp_path / "b")
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(TEXTS))
    code = ("import json, sys; from pathlib import Path; from tidemill.model.chat import train_tokenizer; "
            "train_tokenizer(json.loads(Path(sys.argv[1]).read_text()), 640, words=('larch', ' yew', '<>'))"
            ".save(Path(sys.argv[2]))")
    subprocess.run([sys.executable, "-c", code, str(texts), str(tmp_path / "c")], check=True)
    first, second, third = ((tmp_path / n / "tokenizer.json").read_bytes() for n in "abc")
    assert first == second == third


def test_the_file_loads_here_and_in_the_library(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    again, library = Tokenizer.load(tmp_path), BackendTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "森林 maple can't = 2026\r\n\n naïve  x"
    assert again.digest == TOKENIZER.digest
    assert again.encode_text(text) == TOKENIZER.encode_text(text) == tuple(library.encode(text).ids)


@given(st.lists(st.one_of(st.text(st.characters(exclude_categories=("Cs",)), max_size=40),
                          st.sampled_from([*K3_IDS, " maple", "森林", "message"])), max_size=6).map("".join))
def test_any_text_round_trips_and_never_becomes_a_control_token(text: str) -> None:
    ids = TOKENIZER.encode_text(text)
    assert TOKENIZER.decode(ids) == text
    assert not set(ids) & set(TOKENIZER.control_names)


def test_learnt_tokens_are_bounded() -> None:
    tokenizer = train_tokenizer(["-" * 4000 + " " * 4000 + "ab" * 2000] * 3 + TEXTS, 640)
    assert max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.size)) <= MAX_TOKEN_BYTES


@pytest.mark.parametrize(("size", "words", "message"), [
    (641, (), "multiple of 16"), (256, (), "alone need"), (1 << 16, (), "these texts teach"),
    (640, ("two words",), "cannot be a single token"), (640, ("",), "cannot be a single token"),
])
def test_what_cannot_be_is_refused(size: int, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_tokenizer(TEXTS, size, words=words)


def test_a_lone_surrogate_is_refused_by_place() -> None:
    with pytest.raises(InputError, match=r"texts\[1\]"):
        train_tokenizer(["a", "\ud800"], 640)
