"""A vocabulary trained on the documents a recipe will train on."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.model.chat import ChatCodec, Tokenizer, build_tokenizer, train_tokenizer
from tidemill.train.pretrain.mixture import Mixture
from tidemill.train.pretrain.recipe import Recipe
from tidemill.train.pretrain.sources import open_source


def trained_vocabulary(recipe: Recipe) -> Tokenizer:
    """The recipe's byte-level BPE. Raises ConfigError if the documents teach too few merges for its size."""
    assert recipe.vocabulary is not None
    return train_tokenizer(_texts(recipe, recipe.vocabulary.num_bytes), recipe.vocabulary.size)


def _texts(recipe: Recipe, num_bytes: int) -> Iterator[str]:
    """Runs of text between control tokens, of documents drawn as the training will draw them."""
    plain = build_tokenizer()
    sources = [open_source(section, ChatCodec(plain), seed=recipe.seed, held_out=recipe.held_out.share,
                           context=recipe.context) for section in recipe.data]
    mixture = Mixture(sources, context=recipe.context)
    while num_bytes > 0:
        for sample in mixture.batch(recipe.batch_tokens):
            for run in _between_controls(sample.ids, plain):
                num_bytes -= len(run)
                yield run.decode("utf-8", "replace")


def _between_controls(ids: tuple[int, ...], vocabulary: Tokenizer) -> Iterator[bytes]:
    run = bytearray()
    for token_id in ids:
        run += vocabulary.token_bytes(token_id)
        if vocabulary.token_name(token_id) and run:
            yield bytes(run)
            run.clear()
    if run:
        yield bytes(run)
