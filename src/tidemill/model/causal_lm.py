"""The text model for training: whole sequences in, logits out. Serving has its own walk through the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tidemill.core.errors import InputError
from tidemill.model.config import ModelConfig
from tidemill.model.initialisation import reset_parameters
from tidemill.model.layers import DecoderLayer, Linear, RMSNorm, RoutedExperts, Weight, mixture, pick
from tidemill.model.past import LayerPast, Past, Step
from tidemill.model.quant import Quantization
from tidemill.parallel import ParallelContext, single

Recompute = Literal["none", "layer"]
"""What backward computes again. none: nothing beyond what single operations recompute by themselves; layer: every
decoder layer from its inputs (bank and running sum), so that only those are kept between the passes."""


class ScoreObserver(Protocol):
    """Sees the router scores of every expert layer in forward order; see tidemill.model.balance."""

    def observe(self, layer: int, scores: Tensor) -> None:
        """scores[B·T, E] of 0-based layer `layer`, rows in batch order."""
        ...


class TextModel(nn.Module):
    """Embedding, layers and final mixture. Parameter names below `model.` equal the checkpoint's."""

    def __init__(self, config: ModelConfig, parallel: ParallelContext, recompute: Recompute) -> None:
        super().__init__()
        text = config.text_config
        self.recompute = recompute
        d, dtype = text.hidden_size, text.torch_dtype
        self.eps = text.rms_norm_eps
        self.embed_tokens = Weight(text.vocab_size, d, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(text, index, parallel) for index in range(text.num_hidden_layers))
        self.mixes = text.attn_res_block_size is not None
        if self.mixes:
            self.output_attn_res_norm, self.output_attn_res_proj = Weight(d, dtype=dtype), Weight(1, d, dtype=dtype)
        self.norm = RMSNorm(d, text.rms_norm_eps, dtype)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor | None, select: Tensor | None,
                observer: ScoreObserver | None, past: Past | None = None, step: Step | None = None) -> Tensor:
        """Normed hidden states [B, T, d], or [S, d] at the flat positions `select`. A past comes with a step of it."""
        p = F.embedding(input_ids, self.embed_tokens.weight)
        bank: Sequence[Tensor] = []
        for layer in self.layers:
            last = layer.index == len(self.layers) - 1
            # After the last token mixer nothing looks at other tokens: the rest runs at the wanted ones only.
            at = select if last and observer is None else None
            kept = None if past is None or step is None else (past.layers[cast("DecoderLayer", layer).index], step)
            bank, p, scores = self._layer(layer, bank, p, cu_seqlens, at, kept)
            if at is not None:
                select = None
            if observer is not None and scores is not None:
                observer.observe(cast("DecoderLayer", layer).index, scores.detach())
        if select is not None:
            bank, p = [pick(b, select) for b in bank], pick(p, select)
        if self.mixes:
            p = mixture([*bank, p], self.output_attn_res_norm, self.output_attn_res_proj, self.eps)
        return self.norm(p)

    def _layer(self, layer: nn.Module, bank: Sequence[Tensor], p: Tensor, cu_seqlens: Tensor | None,
               select: Tensor | None, past: LayerPast | None) -> tuple[Sequence[Tensor], Tensor, Tensor | None]:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return layer(bank, p, cu_seqlens, select, past)
        return cast("tuple[Sequence[Tensor], Tensor, Tensor | None]", checkpoint(
            layer, bank, p, cu_seqlens, select, use_reentrant=False, preserve_rng_state=False))  # nothing is random


class CausalLM(nn.Module):
    """The model. `initialise=False` leaves the parameters undefined for a caller that fills all of them at once.

    state_dict() holds the tensors of tidemill.model.inventory (experts stacked), adapters aside.
    """

    def __init__(self, config: ModelConfig, parallel: ParallelContext | None = None, *, seed: int = 0,
                 initialise: bool = True, recompute: Recompute = "none") -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel or single()
        text = config.text_config
        self.model = TextModel(config, self.parallel, recompute)
        self.lm_head = Linear(text.hidden_size, text.vocab_size, text.torch_dtype)
        if initialise:
            self.reset_parameters(seed)

    def reset_parameters(self, seed: int = 0) -> None:
        """Fresh values for every parameter and buffer, a pure function of configuration and seed."""
        reset_parameters(self, self.config.text_config, seed)

    def set_quantization(self, value: Quantization) -> None:
        """What the routed experts compute on (quantisation-aware training). InputError if a width does not allow it."""
        for module in self.modules():
            if isinstance(module, RoutedExperts):
                module.quantization = value

    def forward(self, input_ids: Tensor, *, cu_seqlens: Tensor | None = None, select: Tensor | None = None,
                observer: ScoreObserver | None = None) -> Tensor:
        """Logits[B, T, V] of input_ids[B, T] int64, in the model's dtype; or [S, V] at `select`.

        Rows are right-padded: what stands after a sequence's end changes nothing before it. With cu_seqlens int64
        [n + 1] the one row holds n documents, each computed as if it stood alone. select[S] int64 are
        positions in the flattened [B·T]; only they pass the last feed-forward block and the head. `observer` gets
        router scores of all tokens. InputError if ids are not [B, T] int64 within the vocabulary, or cu_seqlens
        does not fit them.
        """
        self._check_ids(input_ids)
        return self.lm_head(self.model(input_ids, cu_seqlens, select, observer))

    @torch.no_grad()
    def go_on(self, input_ids: Tensor, counts: Tensor, past: Past, *, select: Tensor | None = None) -> Tensor:
        """Logits of new tokens after those in `past`, which takes them in; no gradient.

        input_ids[R] int64: the counts[b] new tokens of every sequence b of the past, one sequence after the other;
        counts[B] int64 >= 0. Returns [R, V], or [S, V] at places select[S] of these R. Equal to `forward` over whole
        sequences up to rounding. InputError as `forward` and `Past.step`.
        """
        if self.parallel.tensor.size > 1:
            raise InputError("a past holds all heads, but they are split over processes", field="past")
        self._check_ids(input_ids.unsqueeze(0))
        step = past.step(counts)
        if input_ids.shape[0] != int(step.cu_seqlens[-1]):
            raise InputError(f"input_ids holds {input_ids.shape[0]} tokens, counts {int(step.cu_seqlens[-1])}",
                             field="input_ids")
        hidden = self.model(input_ids.unsqueeze(0), step.cu_seqlens, select, None, past, step)
        past.advance(step)
        return self.lm_head(hidden).flatten(0, -2)

    def _check_ids(self, input_ids: Tensor) -> None:
        if input_ids.dim() != 2 or input_ids.dtype is not torch.int64:
            raise InputError(f"input_ids is {input_ids.dtype} of shape {tuple(input_ids.shape)}: expected int64 [B, T]",
                             field="input_ids")
        vocab = self.config.text_config.vocab_size
        if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocab:
            raise InputError(f"input_ids holds an id outside 0..{vocab - 1}", field="input_ids",
                             remedy="Check that the tokenizer belongs to this model.")
