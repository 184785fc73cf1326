"""The vocabularies of the package as Hugging Face tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from tidemill.core.errors import InputError
from tidemill.model.chat import Tokenizer
from tidemill.model.chat.codec import ChatCodec, ChatOptions, resolve_effort
from tidemill.model.chat.messages import parse_messages, parse_tools
from tidemill.model.chat.tiktoken_vocabulary import TiktokenVocabulary, convert_tiktoken
from tidemill.model.hub import adopt_tokenizer


class TidemillTokenizer(PreTrainedTokenizerFast):
    """tokenizer.json, or K3's tiktoken.model if there is no such file (converted at each load, half a minute).

    `apply_chat_template` with `tokenize` encodes texts and markers apart, so that a message that spells a marker stays
    text. Calling the tokenizer on a string, or rendering a chat to a string first, reads markers as markers, as usual.
    """

    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "tiktoken.model", "tokenizer_file": "tokenizer.json"}

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """The backend from whichever file there is."""
        file, ranks = kwargs.get("tokenizer_file"), kwargs.pop("vocab_file", None)
        if not (file and Path(file).is_file()) and ranks and Path(ranks).is_file():
            return kwargs | {"tokenizer_object": convert_tiktoken(TiktokenVocabulary.load(Path(ranks))).backend}
        return super().convert_to_native_format(trust_remote_code, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: saved folders name this package; no copy of its code goes into them."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """As the base class, and what AutoTokenizer needs to find this class again."""
        names = super().save_pretrained(save_directory, *args, **kwargs)
        adopt_tokenizer(Path(save_directory))
        return names

    def apply_chat_template(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, conversation: Any, tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None, *,
        add_generation_prompt: bool = False, tokenize: bool = True, chat_template: str | None = None,
        padding: bool | str = False, truncation: bool = False, max_length: int | None = None,
        return_tensors: str | None = None, return_dict: bool = True, **kwargs: Any,
    ) -> Any:
        """As the base class; further: enable_thinking (default True), reasoning_effort (`none`, `low`, `high`, `max`),
        tool_choice, response_format. InputError for what the grammar cannot say."""
        if not tokenize or chat_template is not None:
            return super().apply_chat_template(
                conversation, tools=cast("Any", tools), add_generation_prompt=add_generation_prompt, tokenize=tokenize,
                chat_template=chat_template, padding=padding, truncation=truncation, max_length=max_length,
                return_tensors=return_tensors, return_dict=return_dict, **kwargs)
        options = self._options(tools, add_generation_prompt, kwargs)
        batched = bool(conversation) and isinstance(conversation[0], list | tuple)
        ids = [self._codec.prompt_ids(parse_messages(rows), options)
               for rows in (conversation if batched else [conversation])]
        if truncation:
            limit = max_length or self.model_max_length
            ids = [row[:limit] if self.truncation_side == "right" else row[-limit:] for row in ids]
        whole = self.pad({"input_ids": ids}, padding=padding, max_length=max_length, return_tensors=return_tensors)
        if not batched and return_tensors is None:
            whole = BatchEncoding({name: rows[0] for name, rows in whole.items()})
        return whole if return_dict else whole["input_ids"]

    @cached_property
    def _codec(self) -> ChatCodec:
        """The grammar over this vocabulary, made once, at the first chat."""
        return ChatCodec(Tokenizer(self.backend_tokenizer))

    @staticmethod
    def _options(tools: Any, add_generation_prompt: bool, kwargs: dict[str, Any]) -> ChatOptions:
        known = {"enable_thinking", "thinking", "reasoning_effort", "tool_choice", "response_format"}
        # What this does anyway, or asks for nothing.
        given = {k for k, v in kwargs.items() if v and k not in ("sanitize_control_tokens", "tokenizer_kwargs")}
        if unknown := sorted(given - known):
            raise InputError(f"{unknown[0]}: unknown; the chat grammar knows {', '.join(sorted(known))}",
                             field=unknown[0])
        thinking, effort = resolve_effort(kwargs.get("reasoning_effort"))
        wanted = kwargs.get("enable_thinking", kwargs.get("thinking", True))
        schemas = [get_json_schema(t) if callable(t) else t for t in tools or ()]
        return ChatOptions(thinking=thinking and bool(wanted), effort=effort, tools=parse_tools(schemas),
                           tool_choice=kwargs.get("tool_choice", "auto"),
                           response_format=kwargs.get("response_format"), generation_prefix=add_generation_prompt)
