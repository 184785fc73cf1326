"""tidemill.model.past behind the interface that `generate()` expects of a cache."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tidemill.core.errors import InputError
from tidemill.model.config import TextConfig
from tidemill.model.past import Past


class HybridCache(Cache):
    """KDA states and convolution inputs, which never grow, and MLA latents, which do, of one batch.

    Made by `generate()` and by a forward pass with `use_cache`; to go on from it, give it back as `past_key_values`.
    Padding never enters it. It cannot be cropped: a state does not know what it was some tokens ago.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__(layers=[])
        self._config = config
        self._past: Past | None = None
        self._columns = 0

    def past(self, batch: int) -> Past:
        """What is kept of `batch` sequences; begins empty. InputError if it is of another number."""
        if self._past is None:
            self._past = Past(self._config, batch)
        if len(self._past.lengths) != batch:
            raise InputError(f"past_key_values holds {len(self._past.lengths)} sequences, input_ids {batch}",
                             field="past_key_values")
        return self._past

    def count(self, columns: int) -> None:
        """Note that so many columns of input_ids were taken in, padding included."""
        self._columns += columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of input_ids taken in so far, padding included."""
        return self._columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._past is not None:
            self._select(torch.arange(len(self._past.lengths)).repeat_interleave(repeats))

    def reset(self) -> None:
        self._past, self._columns = None, 0

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise InputError("a cache with recurrent states cannot be cropped", field="past_key_values",
                         remedy="Copy it before the tokens that may have to be taken back.")

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError("this cache is kept by the model, not layer by layer", field="past_key_values")

    @property
    def is_initialized(self) -> bool:
        return self._past is not None

    @property
    def is_compileable(self) -> bool:
        return False

    def __len__(self) -> int:
        return self._config.num_hidden_layers

    def __repr__(self) -> str:
        sequences = 0 if self._past is None else len(self._past.lengths)
        return f"HybridCache({sequences} sequences, {self._columns} columns)"

    def _select(self, index: Tensor) -> None:
        if self._past is not None:
            self._past.select(index.to(torch.int64))
