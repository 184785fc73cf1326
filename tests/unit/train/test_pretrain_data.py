"""Documents, their masks, files, held-out texts and the mixture."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.errors import ConfigError, InputError
from tidemill.model.chat import ChatCodec, build_tokenizer
from tidemill.train.config import TaskSection
from tidemill.train.pretrain import text_files
from tidemill.train.pretrain.documents import Document, conversation_document, text_document
from tidemill.train.pretrain.mixture import Mixture
from tidemill.train.pretrain.schedule import ScheduleSection
from tidemill.train.pretrain.sources import FileSource, Source, SourceSection, TaskSource, open_source

TOKENIZER = build_tokenizer()
CODEC = ChatCodec(TOKENIZER)


def files(tmp_path: Path, *, weight: float = 1, held_out: float = 0.0, seed: int = 0, **given: Any) -> FileSource:
    data: dict[str, Any] = {"name": "some", "licence": "none", "weight": weight, "text": (f"{tmp_path}/*",)}
    source = open_source(SourceSection(**(data | given)), CODEC, seed=seed, held_out=held_out, context=16)
    assert isinstance(source, FileSource)
    return source


def learned_text(document: Document) -> str:
    """What is learned, markers spelled out."""
    return CODEC.describe(i for i, learned in zip(document.ids, document.learned, strict=True) if learned)


# -- documents ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=2, max_size=60), st.integers(2, 20))
def test_every_learned_token_is_predicted_once_with_its_own_past(learned: list[bool], context: int) -> None:
    document = Document(tuple(range(len(learned))), tuple(learned))
    predicted: list[int] = []
    for sample in document.pieces(context):
        assert len(sample.ids) <= context
        assert sample.ids == tuple(range(sample.ids[0], sample.ids[-1] + 1))
        assert sample.sampled[-1]
        assert not sample.sampled[0]
        predicted += [i for i, chosen in zip(sample.ids, sample.sampled, strict=True) if chosen]
    assert predicted == [i for i in range(1, len(learned)) if learned[i]]


def test_a_text_is_learned_whole_and_ends_where_its_document_ends() -> None:
    control = TOKENIZER.control
    whole, excerpt = (text_document("Ahoy <|open|>", TOKENIZER, is_end=end) for end in (True, False))
    assert whole.ids == (control.bos, *TOKENIZER.encode_text("Ahoy <|open|>"), control.eos)
    assert excerpt.ids == whole.ids[:-1]
    assert control.open not in whole.ids
    assert all(whole.learned)


CALL = {"id": "1", "type": "function", "function": {"name": "sh", "arguments": {"command": "ls"}}}


def test_learned_is_what_the_assistant_writes() -> None:
    row = {"messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Files?"},
        {"role": "assistant", "content": "", "reasoning_content": "List them.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "a.txt"}, {"role": "assistant", "content": "a.txt"},
    ]}
    text = learned_text(conversation_document(row, CODEC, where="here"))
    assert text == (
        "List them.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="sh" index="1"<|sep|><|open|>argument key="command" type="string"<|sep|>ls'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        "<|close|>think<|sep|><|open|>response<|sep|>a.txt<|close|>response<|sep|><|close|>message<|sep|>"
        "<|end_of_msg|>"
    )


def test_a_turn_without_thinking_and_one_with_a_name() -> None:
    row = {"thinking": False, "messages": [{"role": "user", "content": "Hi"},
                                           {"role": "assistant", "name": "ann", "content": "Yes."}]}
    assert learned_text(conversation_document(row, CODEC, where="here")) == \
        "Yes.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def test_arguments_that_are_no_json_are_shown_and_not_learned() -> None:
    calls = [{"function": {"name": "sh", "arguments": "{oh"}}, {"function": {"name": "sh", "arguments": "{no"}}, CALL]
    row = {"messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "tool_calls": calls}]}
    document = conversation_document(row, CODEC, where="here")
    assert "{oh" in CODEC.describe(document.ids)
    text = learned_text(document)
    assert "{oh" not in text
    assert "{no" not in text
    assert "json" not in text
    assert text.count('<|open|>call tool="sh"') == 3
    assert "ls<|close|>argument" in text


@pytest.mark.parametrize(("row", "told"), [
    ({"messages": [{"role": "user", "content": "Hi"}]}, "nothing to learn"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "role"),
    ({"mesages": []}, "mesages: unknown key"),
])
def test_a_bad_conversation_is_refused_with_its_place(row: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told) as refused:
        conversation_document(row, CODEC, where="rows.jsonl, byte 12")
    assert "rows.jsonl, byte 12" in str(refused.value)


# -- files -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="aé\n\U0001f40b", max_size=300), st.integers(4, 40), st.integers(8, 90))
def test_excerpts_cover_a_file_without_overlap_and_cut_no_character(
    tmp_path_factory: pytest.TempPathFactory, text: str, excerpt: int, limit: int,
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "DOCUMENT_BYTES", limit)
        spans = text_files.spans_of(path, excerpt_bytes=excerpt)
    data, reader = text.encode(), text_files.Reader()
    covered = bytearray(data)
    for span in spans:
        assert span.stop - span.start <= excerpt
        assert reader.text(span).encode() == data[span.start : span.stop]
        covered[span.start : span.stop] = b" " * (span.stop - span.start)
    assert not covered.strip()
    assert [s.start for s in spans] == sorted(s.start for s in spans)


def test_compressed_files_and_rows_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress("gzip é".encode()))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "row one"}) + "\n\n" + json.dumps({"text": "row two"}))
    source = files(tmp_path)
    texts = {TOKENIZER.decode(source.document(i).ids, control=False) for i in range(3)}
    assert texts == {"gzip é", "row one", "row two"}
    assert source.document(0) == source.document(3 * 5) or len(texts) == 3


def test_passes_over_the_files_differ_and_hold_every_document(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    source = files(tmp_path)
    passes = [[source.document(12 * turn + i).ids for i in range(12)] for turn in range(2)]
    assert Counter(passes[0]) == Counter(passes[1])
    assert len(set(passes[0])) == 12
    assert passes[0] != passes[1]
    assert [files(tmp_path).document(i).ids for i in range(12)] == passes[0]
    assert [files(tmp_path, seed=1).document(i).ids for i in range(12)] != passes[0]


def test_what_is_held_out_is_never_trained_on_and_follows_from_the_text(tmp_path: Path) -> None:
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"text number {i} and so on\n" * 3)
    source = files(tmp_path, held_out=0.3)
    held = [found.document.ids for found in source.held_out()]
    seen = [source.document(i).ids for i in range(len(source.train))]
    assert 5 < len(held) / 3 < 35
    assert not set(held) & set(seen)
    assert sum(f.num_bytes for f in source.held_out()) == source.describe()["held_out_bytes"]
    for path in sorted(tmp_path.iterdir()):
        path.rename(tmp_path / f"moved-{path.name}")
    assert {f.document.ids for f in files(tmp_path, held_out=0.3).held_out()} == set(held)


@pytest.mark.parametrize(("name", "data", "told"), [
    ("a.txt", b"fine \xff", r"a\.txt is not UTF-8 \(byte 5\)"),
    ("a.gz", b"no gzip", "cannot read .*a.gz"),
    ("a.txt", b" \n", "no document to train on"),
])
def test_bad_files_are_refused(tmp_path: Path, name: str, data: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=told):
        files(tmp_path)


def test_bad_rows_are_refused_when_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"tex": 1}\n')
    with pytest.raises(ConfigError, match="byte 0 has no field text"):
        files(tmp_path).document(0)
    (tmp_path / "a.jsonl").write_text("[1]\n")
    with pytest.raises(InputError, match="byte 0 is no object"):
        files(tmp_path).document(0)
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(InputError, match="byte 0 is not JSON"):
        files(tmp_path).document(0)


def test_patterns_find_files_and_say_what_they_miss(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "deep/er/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = text_files.find_files([f"{tmp_path}/**/*.txt", f"!{tmp_path}/b*"], field="data.x")
    assert [p.name for p in found] == ["a.txt", "c.txt"]
    with pytest.raises(ConfigError, match=r"data\.x.*nothing\*' matches no file"):
        text_files.find_files([f"{tmp_path}/nothing*"], field="data.x")
    assert any(p.name == "abc.py" for p in text_files.find_files(["{stdlib}/a*.py"], field="data.x"))


def test_other_data_than_the_recipe_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    digest = files(tmp_path).digest
    assert files(tmp_path, digest=digest).digest == digest
    (tmp_path / "a.txt").write_text("two")
    with pytest.raises(ConfigError, match="the recipe says"):
        files(tmp_path, digest=digest)


def test_a_file_that_changes_in_the_middle_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    source = files(tmp_path)
    (tmp_path / "a.txt").write_text("two")
    with pytest.raises(InputError, match="changed while it was in use"):
        source.document(0)


@pytest.mark.parametrize("given", [
    {"text": ()}, {"conversations": ("b",)}, {"weight": 0.0}, {"licence": ""}, {"chain": 0}, {"thinking": 1.5},
])
def test_bad_sections_are_refused(given: dict[str, Any]) -> None:
    SourceSection(name="x", licence="y", weight=1.0, text=("a",))
    with pytest.raises(ConfigError):
        SourceSection(**({"name": "x", "licence": "y", "weight": 1.0, "text": ("a",)} | given))


# -- tasks -------------------------------------------------------------------------------------------------------------


def toolbox(context: int = 4096, **given: Any) -> TaskSource:
    section = SourceSection(name="toolbox", licence="generated", weight=1, task=TaskSection(name="toolbox"), **given)
    source = open_source(section, CODEC, seed=5, held_out=0.0, context=context)
    assert isinstance(source, TaskSource)
    return source


def test_a_task_gives_conversations_its_own_demonstrations_make() -> None:
    texts = [learned_text(toolbox().document(i)) for i in range(20)]
    assert any('<|open|>call tool="calculator" index="1"' in text for text in texts)
    assert all(text.endswith("<|close|>message<|sep|><|end_of_msg|>") for text in texts)
    assert toolbox().document(3) == toolbox().document(3)
    assert "think" not in "".join(learned_text(toolbox(thinking=0.0).document(i)) for i in range(5))


def test_problems_are_chained_as_far_as_the_context_goes() -> None:
    control = TOKENIZER.control
    short, long = toolbox(chain=5, context=1000), toolbox(chain=5)
    counts = {len(list(filter(control.end_of_msg.__eq__, long.document(i).ids))) for i in range(20)}
    assert len(counts) > 4
    for i in range(20):
        assert len(short.document(i).ids) <= 1000
        assert short.document(i).ids == long.document(i).ids[: len(short.document(i).ids)]


# -- mixture -----------------------------------------------------------------------------------------------------------


def two(tmp_path: Path) -> list[Source]:
    for name, length in (("short", 3), ("long", 40)):
        (tmp_path / name).mkdir(exist_ok=True)
        for i in range(5):
            (tmp_path / name / f"{i}.txt").write_text(f"{i}" * length)
    return [files(tmp_path / "short", name="short", weight=1), files(tmp_path / "long", name="long", weight=3)]


def test_tokens_follow_the_weights(tmp_path: Path) -> None:
    mixture = Mixture(two(tmp_path), context=16)
    for _ in range(20):
        samples = mixture.batch(200)
        assert 200 <= sum(len(s.ids) for s in samples) < 216
    assert mixture.tokens["long"] / mixture.tokens["short"] == pytest.approx(3, rel=0.03)


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 7])
def test_a_mixture_goes_on_where_it_was(tmp_path: Path, batches: int) -> None:
    first = Mixture(two(tmp_path), context=16)
    for _ in range(batches):
        first.batch(50)
    state = json.loads(json.dumps(first.state()))
    second = Mixture(two(tmp_path), context=16)
    second.restore(state)
    assert [second.batch(50) for _ in range(4)] == [first.batch(50) for _ in range(4)]
    assert second.state() == first.state()


# -- schedule ----------------------------------------------------------------------------------------------------------


def test_cosine_rises_then_falls_to_its_floor() -> None:
    s = ScheduleSection(steps=100, warmup=0.1, floor=0.2)
    shares = [s.share(step) for step in range(1, 101)]
    assert shares[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert s.share(55) == pytest.approx(0.6)
    assert s.share(100) == pytest.approx(0.2)


def test_plateau_and_linear_end() -> None:
    s = ScheduleSection(kind="wsd", steps=100, warmup=0.02, decay=0.19)
    assert [s.share(step) for step in (1, 2, 50, 81)] == [0.5, 1.0, 1.0, 1.0]
    assert s.share(91) == pytest.approx(0.5)
    assert s.share(100) == pytest.approx(0.05)
    with pytest.raises(ConfigError, match="steps"):
        ScheduleSection(steps=0)
