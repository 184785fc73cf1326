"""Sampled ids as text that can be shown: incremental decoding, and stop strings that never leak."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from tidemill.core.errors import InputError
from tidemill.model.chat import TextDelta, Vocabulary

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


class PlainParser:
    """Ids to text without any grammar; control tokens show nothing. The counterpart of the chat codec's parser."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> list[TextDelta]:
        """Text that became certain; bytes of an unfinished character are held back."""
        text = self._decoder.decode(b"".join(self._vocabulary.token_bytes(i) for i in ids))
        return [TextDelta("content", text)] if text else []

    def finish(self) -> list[TextDelta]:
        """What an unfinished character leaves."""
        text = self._decoder.decode(b"", True)
        return [TextDelta("content", text)] if text else []


class StopScanner:
    """Finds the first stop string in a text that arrives in pieces, and shows nothing that could belong to one.

    `shown` counts characters given out, `seen` characters pushed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.seen = 0
        self.shown = 0
        self.matched = ""
        """The stop string found, empty before."""

    def push(self, text: str) -> str:
        """More text; returns what may be shown now. After a match nothing more is shown."""
        if self.matched:
            return ""
        self.seen += len(text)
        held = self._held + text
        found = min(((at, s) for s in self._stops if (at := held.find(s)) >= 0), default=None)
        if found is not None:
            at, self.matched = found
            self._held = ""
            return self._show(held[:at])
        keep = self._possible_start(held)
        self._held = held[len(held) - keep :]
        return self._show(held[: len(held) - keep])

    def flush(self) -> str:
        """The text is over (or a channel is): what was held back is no stop string after all."""
        text, self._held = self._held, ""
        return self._show(text)

    def _show(self, text: str) -> str:
        self.shown += len(text)
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(s) for s in self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - n :]
            if any(s.startswith(end) for s in self._stops):
                return n
        return 0


def parse_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """OpenAI's `stop`. Raises InputError on an empty string or too many."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise InputError(f"stop holds {len(stops)} strings: expected at most {MAX_STOPS}", field="stop")
    for s in stops:
        if not s or len(s) > MAX_STOP_CHARS:
            raise InputError(f"stop holds a string of {len(s)} characters: expected 1 to {MAX_STOP_CHARS}",
                             field="stop")
    return stops
