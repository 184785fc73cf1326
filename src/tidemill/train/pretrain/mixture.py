"""Documents of several sources in the proportions of their weights, cut into samples, a batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.train.pretrain.sources import Source
from tidemill.train.samples import Sample


class Mixture:
    """Always draws from the source that is furthest behind its share of the tokens. Deterministic; `state` says where
    it stands."""

    def __init__(self, sources: Sequence[Source], *, context: int) -> None:
        self._sources = {source.section.name: source for source in sources}
        self._context = context
        self._drawn = dict.fromkeys(self._sources, 0)
        self._tokens = dict.fromkeys(self._sources, 0)
        self._last = ""
        self._waiting: list[Sample] = []
        """What is left of the last document of source `_last`."""

    def batch(self, tokens: int) -> list[Sample]:
        """Samples of `tokens` tokens together, or less than a context more."""
        samples: list[Sample] = []
        total = 0
        while total < tokens:
            while not self._waiting:
                self._draw()
            samples.append(self._waiting.pop(0))
            total += len(samples[-1].ids)
        return samples

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens drawn from each source."""
        return dict(self._tokens)

    def state(self) -> dict[str, Any]:
        """JSON data for `restore`."""
        return {"drawn": dict(self._drawn), "tokens": self.tokens, "last": self._last, "waiting": len(self._waiting)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a mixture of the same sources was when it gave `state`."""
        self._drawn, self._tokens = dict(state["drawn"]), dict(state["tokens"])
        self._last, waiting = state["last"], int(state["waiting"])
        pieces = self._pieces(self._last, self._drawn[self._last] - 1) if waiting else []
        self._waiting = pieces[len(pieces) - waiting :]

    def _draw(self) -> None:
        self._last = min(self._sources, key=lambda n: self._tokens[n] / self._sources[n].section.weight)
        self._waiting = self._pieces(self._last, self._drawn[self._last])
        self._drawn[self._last] += 1
        self._tokens[self._last] += sum(len(sample.ids) for sample in self._waiting)

    def _pieces(self, name: str, number: int) -> list[Sample]:
        return list(self._sources[name].document(number).pieces(self._context))
