"""What training reads: a document as token ids, and which of them are to be predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tidemill.core.errors import InputError
from tidemill.model.chat.codec import ChatCodec, ChatOptions
from tidemill.model.chat.grammar import Marker, Segments, attribute
from tidemill.model.chat.messages import parse_messages, parse_tools
from tidemill.model.chat.tokenizer import Vocabulary
from tidemill.train.samples import Sample


@dataclass(frozen=True, slots=True)
class Document:
    """`learned` marks the tokens that enter the loss; the first token of a document is never predicted."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]

    def pieces(self, context: int) -> Iterator[Sample]:
        """Samples of at most `context` tokens. A longer document is cut; each piece begins with the last token of the
        one before, so that every token is predicted once. Pieces with nothing to learn are left out."""
        start = 0
        while start == 0 or start < len(self.ids) - 1:
            ids = self.ids[start : start + context]
            learned = (False, *self.learned[start + 1 : start + context])
            if any(learned):
                end = len(learned) - learned[::-1].index(True)
                yield Sample(ids[:end], learned[:end], (0.0,) * end, 0.0)
            start += context - 1


def text_document(text: str, vocabulary: Vocabulary, *, is_end: bool) -> Document:
    """[BOS] text, and [EOS] if it ends its document; all of it learned."""
    end = (vocabulary.control.eos,) if is_end else ()
    ids = (vocabulary.control.bos, *vocabulary.encode_text(text), *end)
    return Document(ids, (True,) * len(ids))


def conversation_document(row: Mapping[str, Any], codec: ChatCodec, *, where: str) -> Document:
    """A conversation in OpenAI's form: `messages`, optionally `tools` and `thinking` (default true).

    Learned is what the model would have to write: assistant turns after their generation prefix, with the end marker.
    Arguments that are not JSON (a raw `json` element) are shown and not learned. Raises InputError naming `where`.
    """
    unknown = sorted(set(row) - {"messages", "tools", "thinking"})
    if unknown:
        raise InputError(f"{where}: {unknown[0]}: unknown key", field=unknown[0],
                         remedy="A conversation has messages, tools and thinking.")
    try:
        options = ChatOptions(thinking=bool(row.get("thinking", True)), tools=parse_tools(row.get("tools")),
                              generation_prefix=False)
        parts = codec.render(parse_messages(row.get("messages", ())), options)
    except InputError as e:
        raise InputError(f"{where}: {e}", field=e.field) from e
    ids: list[int] = []
    learned: list[bool] = []
    for segments in parts:
        written = _written(segments)
        for number, segment in enumerate(segments):
            new = codec.encode([segment])
            ids += new
            learned += [number in written] * len(new)
    if not any(learned):
        raise InputError(f"{where}: no assistant message, so there is nothing to learn", field="messages")
    return Document(tuple(ids), tuple(learned))


def _written(segments: Segments) -> set[int]:
    """Numbers of the segments of a rendered message that the model would write itself: in an assistant message all
    after the opening of its first channel, except raw `json` elements."""
    if segments[2:5] != attribute("role", "assistant")[:3]:
        return set()
    _, second, *_ = (i for i, segment in enumerate(segments) if segment is Marker.SEP)
    written = set(range(second + 1, len(segments)))
    for start, pair in enumerate(pairwise(segments)):
        if pair == (Marker.OPEN, "json"):
            end = next(i for i in range(start, len(segments)) if segments[i : i + 2] == [Marker.CLOSE, "json"])
            written -= set(range(start, end + 3))
    return written
