"""K3's rank file: published ids, tiktoken itself as oracle, refusal by line, and the same ids as tokenizer.json."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer

from tidemill.core.errors import ConfigError, InputError
from tidemill.model.chat import (
    ChatCodec,
    ChatOptions,
    InstructionTexts,
    TiktokenVocabulary,
    Tokenizer,
    convert_tiktoken,
    parse_messages,
)
from tidemill.model.chat import tiktoken_vocabulary as module
from tidemill.model.chat.control import K3_BASE, K3_CONTROL, K3_IDS
from tidemill.model.chat.pattern import K3_PATTERN
from tidemill.model.chat.tiktoken_vocabulary import MAX_CHARS, MAX_RUN, read_ranks

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [*PRINTABLE, *(b for b in range(256) if b not in PRINTABLE)]
"""Bytes in the order of their ranks: the quotation mark is 1, as published."""
PUBLISHED = {
    "think": 39964, "response": 12092, "message": 2778, "tools": 25385, "call": 10257, "argument": 47185,
    " role": 6244, '="': 878, "user": 2482, "Hi": 18699, "assistant": 69702, "because": 47221,
}
NASTY = [
    "", " ", "\n", "\r\n\r\n", " \n \n x", "a  b   c\t\td ", "it's IT'S we'LL i'd'Ve o'\u017f x'\u017fy",
    "Hello, World!!\n\n\n", "1234567 3.14 ١٢٣٤ Ⅷ ½²³", "森林abc日本語テキスト、。", "中a文B字",
    "ǅabc ABCdef camelCase HTTPServer", "é e\u0301 \u0301x", "👩\u200d👩\u200d👧🏳\ufe0f\u200d🌈 x",
    "\u200b\ufeff\u00a0\u2003x\u3000y", "\u0085\u2028\u2029", '<|open|>message role="x"<|sep|>[EOS]', "\x00\x01\x7f",
    "नमस्ते สวัสดี مرحبا שלום", "\U0001f1e9\U0001f1ea \U000e0041 \U0002a6d6 \U00030000 \U000e0100",
    "''''s ...---...\n", "x" * 300, " " * 300 + "y",
]


def write(path: Path, tokens: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens)))
    return path


def ranked(*more: bytes) -> dict[bytes, int]:
    return {t: i for i, t in enumerate((*(bytes([b]) for b in BYTES), *more))}


def learnt(words: list[str], count: int) -> list[bytes]:
    """Tokens of a small BPE learnt by counting pairs, the slow way."""
    pieces = [[bytes([b]) for b in w.encode()] for w in words]
    tokens: list[bytes] = []
    while len(tokens) < count:
        counts: dict[tuple[bytes, bytes], int] = {}
        for p in pieces:
            for pair in pairwise(p):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        (a, b), _ = min(counts.items(), key=lambda kv: (-kv[1], kv[0]))
        tokens.append(a + b)
        for p in pieces:
            i = 0
            while i < len(p) - 1:
                if (p[i], p[i + 1]) == (a, b):
                    p[i : i + 2] = [a + b]
                i += 1
    return list(dict.fromkeys(tokens))


TOKENS = learnt([" role", " the", "there", "森林", "日本", " word", "words", "123", "  ", "\n\n", "abab", "ababab",
                 '="', "message", "massage", "é", "naïve", "the", "other", "👩‍👩"] * 2, 70)
SMALL = TiktokenVocabulary(ranked(*TOKENS))
ORACLE = tiktoken.Encoding("oracle", pat_str=K3_PATTERN, mergeable_ranks=ranked(*TOKENS), special_tokens={})
TEXTS = st.lists(st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20), st.sampled_from(NASTY),
    st.sampled_from([*K3_IDS, *(t.decode("utf-8", "ignore") for t in TOKENS)])), max_size=6).map("".join)


# -- the released vocabulary's shape ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> TiktokenVocabulary:
    """As many tokens as released, the published words at their ids, byte strings of no meaning at the others."""
    at = {rank: word.encode() for word, rank in PUBLISHED.items()}
    tokens = [bytes([b]) for b in BYTES]
    tokens += [at.get(i, b"\xff" + i.to_bytes(3, "big")) for i in range(256, K3_BASE)]
    return TiktokenVocabulary.load(write(tmp_path_factory.mktemp("k3") / "tiktoken.model", tokens), size=163_840)


HI = [163587, 2778, 6244, 878, 2482, 1, 163589, 18699, 163588, 2778, 163589, 163586]
SUFFIX = [163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 39964, 163589]
ANSWER = [163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 39964, 163589, 47221, 163588, 39964, 163589, 163587, 12092,
          163589, 64, 16, 163588, 12092, 163589, 163588, 2778, 163589, 163586]


def test_published_ids(released: TiktokenVocabulary) -> None:
    codec = ChatCodec(released, InstructionTexts(static_tools="", dynamic_tools="", choice_required="", choice_none="",
                                                 format_object="", format_schema=""))
    hi = parse_messages([{"role": "user", "content": "Hi"}])
    assert codec.prompt_ids(hi) == HI + SUFFIX
    assert codec.prompt_ids(hi, ChatOptions(thinking=False)) == HI + [12092 if i == 39964 else i for i in SUFFIX]
    rows = parse_messages([{"role": "user", "content": "q1"},
                           {"role": "assistant", "content": "a1", "reasoning_content": "because"},
                           {"role": "user", "content": "q2"}])
    first, second = ([*HI[:7], 80, n, *HI[8:]] for n in (16, 17))
    assert codec.prompt_ids(rows) == [*first, *ANSWER, *second, *SUFFIX]
    assert [released.encode_text(w) for w in ("tools", "call", "argument", '"')] == [[25385], [10257], [47185], [1]]


def test_control_ids_are_the_released_ones(released: TiktokenVocabulary) -> None:
    assert released.control == K3_CONTROL
    assert released.size == 163_840
    names = released.control_names
    assert sorted(names) == list(range(163_584, 163_840))
    assert {i: n for i, n in names.items() if not n.startswith("<|reserved")} == {i: n for n, i in K3_IDS.items()}
    assert all(n == f"<|reserved_token_{i}|>" for i, n in names.items() if n.startswith("<|reserved"))
    assert released.token_bytes(163_583)
    assert not released.token_bytes(163_584)


def test_control_ids_of_a_smaller_file_follow_its_tokens() -> None:
    base = 256 + len(TOKENS)
    assert (SMALL.control.bos, SMALL.control.open, SMALL.control.pad) == (base, base + 3, base + 255)
    assert SMALL.size == base + 256


# -- ids --------------------------------------------------------------------------------------------------------------


@given(TEXTS)
def test_ids_are_those_of_tiktoken_and_round_trip(text: str) -> None:
    ids = SMALL.encode_text(text)
    assert ids == ORACLE.encode_ordinary(text)
    assert SMALL.decode(ids) == text
    assert not set(ids) & set(SMALL.control_names)


@pytest.mark.parametrize(("text", "pieces"), [
    ("森林abc", ["森林", "abc"]), ("ABC森林", ["ABC", "森林"]), ("it's IT'S", ["it's", " IT'S"]),
    ("HTTPServer", ["HTTPServer"]),
    ("camelCase", ["camel", "Case"]), ("1234567", ["123", "456", "7"]), (" !?\n\nx", [" !?\n\n", "x"]),
    ("a  \n\n b", ["a", "  \n\n", " b"]), ("a   b", ["a", "  ", " b"]), ("a  ", ["a", "  "]), ("(word", ["(word"]),
    ("we'LL", ["we'LL"]), ("o'clock", ["o", "'clock"]), ("x=1", ["x", "=", "1"]), ("é\u0301a", ["é\u0301a"]),
    ("\tword", ["\tword"]), ("\nword", ["\n", "word"]), ("a'\u017f", ["a'\u017f"]),
])
def test_pieces(text: str, pieces: list[str]) -> None:
    """A token for each expected piece and for the whole text: the pieces win, so they are where text is cut."""
    wanted = [p.encode() for p in dict.fromkeys([*pieces, text]) if len(p.encode()) > 1]
    vocabulary = TiktokenVocabulary(ranked(*wanted))
    assert [vocabulary.token_bytes(i).decode() for i in vocabulary.encode_text(text)] == pieces


def test_giant_texts_are_cut_as_released_and_round_trip() -> None:
    for text in (" " * 1_000_000 + "a", "a" * 60_000, "ab " * 200_000):
        assert SMALL.decode(SMALL.encode_text(text)) == text
    pairs = TiktokenVocabulary(ranked(b"aa"))
    run = "b" + "a" * (2 * MAX_RUN)
    assert len(pairs.encode_text(run)) == 1 + (MAX_RUN // 2 - 1) + 1 + MAX_RUN // 2 + 1
    block = "\n" + "a " * (MAX_CHARS // 2 - 1) + "aa"
    assert len(pairs.encode_text(block)) == len(block) == MAX_CHARS + 1, "the last pair is cut in two"


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InputError, match="surrogate"):
        SMALL.encode_text("a\ud800b")


# -- bad files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "message"), [
    ({3: b"not base64! 3"}, r":4: expected a token"), ({3: b"?? 3"}, r":4: .*is not base64"),
    ({3: b"JQ== x"}, r":4: expected"), ({3: b"JQ== -3"}, r":4: expected"), ({3: b""}, r":4: expected"),
    ({3: b" 3"}, r":4: an empty token"),
    ({3: b"JA==  3"}, ":4: expected"), ({4: b"JA== 4"}, r":5: the token b'\$' stands in line 4"),
    ({4: b"JQ== 3"}, ":5: rank 3 stands in line 4"), ({4: b"JQ== 999"}, ":5: rank 999 in a file of 256 tokens"),
    ({4: b"AAAA 4"}, "no token for the byte 0x25"), ({255: b"rQ== 25"}, ":256: rank 25 stands in line 26"),
])
def test_a_bad_line_is_refused_by_number(tmp_path: Path, change: Mapping[int, bytes], message: str) -> None:
    path = write(tmp_path / "tiktoken.model", [bytes([b]) for b in BYTES])
    assert len(read_ranks(path)) == 256
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join(change.get(i, line) for i, line in enumerate(lines)))
    with pytest.raises(ConfigError, match=message):
        TiktokenVocabulary.load(tmp_path)


def test_a_file_of_another_length_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiktoken.model", ranked(*TOKENS))
    assert TiktokenVocabulary.load(path, size=SMALL.size).size == SMALL.size
    with pytest.raises(ConfigError, match=f"make {SMALL.size}, expected {SMALL.size + 1}"):
        TiktokenVocabulary.load(path, size=SMALL.size + 1)
    with pytest.raises(ConfigError, match="cannot read"):
        TiktokenVocabulary.load(tmp_path / "none")


# -- as tokenizer.json ------------------------------------------------------------------------------------------------


CONVERTED = convert_tiktoken(SMALL)


def test_libraries_that_know_other_characters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """POSIX classes are ASCII in one and Unicode in the other."""
    module._check_classes.cache_clear()
    monkeypatch.setattr(module, "CLASSES", ("[[:punct:]]",))
    with pytest.raises(ConfigError, match=r"disagree whether U\+"):
        convert_tiktoken(SMALL)


@given(TEXTS)
def test_the_converted_file_gives_the_same_ids(text: str) -> None:
    assert CONVERTED.encode_text(text) == tuple(SMALL.encode_text(text))


@pytest.mark.parametrize("text", NASTY)
def test_nasty_texts_have_the_same_ids(text: str) -> None:
    assert CONVERTED.encode_text(text) == tuple(SMALL.encode_text(text))


def test_names_control_ids_and_bytes_are_kept(tmp_path: Path) -> None:
    assert (CONVERTED.size, CONVERTED.control) == (SMALL.size, SMALL.control)
    assert CONVERTED.control_names == SMALL.control_names
    assert [CONVERTED.token_bytes(i) for i in range(SMALL.size)] == [SMALL.token_bytes(i) for i in range(SMALL.size)]
    CONVERTED.save(tmp_path)
    assert Tokenizer.load(tmp_path).digest == CONVERTED.digest
    library = BackendTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.encode("words <|open|> there").ids == [
        *SMALL.encode_text("words "), SMALL.control.open, *SMALL.encode_text(" there")]


@settings(max_examples=30)
@given(st.lists(st.text("abc", min_size=2, max_size=6), unique=True, max_size=40), st.text("abc", max_size=40))
def test_any_ranks_at_all_are_converted_exactly(tokens: list[str], text: str) -> None:
    """Ranks no training would give: parts that rank behind the whole, tokens that merging never reaches."""
    vocabulary = TiktokenVocabulary(ranked(*(t.encode() for t in tokens)))
    assert convert_tiktoken(vocabulary).encode_text(text) == tuple(vocabulary.encode_text(text))


def test_many_random_texts_over_few_letters_have_the_same_ids() -> None:
    rng = random.Random(3)
    for _ in range(30):
        tokens = list({"".join(rng.choices("ab", k=rng.randint(2, 7))) for _ in range(60)})
        rng.shuffle(tokens)
        vocabulary = TiktokenVocabulary(ranked(*(t.encode() for t in tokens)))
        other = convert_tiktoken(vocabulary)
        for _ in range(60):
            text = "".join(rng.choices("ab", k=rng.randint(1, 60)))
            assert other.encode_text(text) == tuple(vocabulary.encode_text(text))
