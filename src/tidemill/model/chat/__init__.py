"""Tokenizer and chat codec: text, messages and ids into each other. Knows no engine and no HTTP; imports no torch."""

from tidemill.model.chat.bpe import train_tokenizer
from tidemill.model.chat.codec import ChatCodec, ChatOptions, resolve_effort
from tidemill.model.chat.fit import check_tokenizer, load_tokenizer
from tidemill.model.chat.messages import Message, ToolCall, parse_messages, parse_tools
from tidemill.model.chat.parser import MalformedCall, ParsedCall, ParsedMessage, StreamParser, TextDelta
from tidemill.model.chat.texts import OWN_TEXTS, InstructionTexts
from tidemill.model.chat.tiktoken_vocabulary import TiktokenVocabulary, convert_tiktoken
from tidemill.model.chat.tokenizer import Tokenizer, Vocabulary, build_tokenizer

__all__ = [
    "OWN_TEXTS", "ChatCodec", "ChatOptions", "InstructionTexts", "MalformedCall", "Message", "ParsedCall",
    "ParsedMessage", "StreamParser", "TextDelta", "TiktokenVocabulary", "Tokenizer", "ToolCall", "Vocabulary",
    "build_tokenizer", "check_tokenizer", "convert_tiktoken", "load_tokenizer", "parse_messages", "parse_tools",
    "resolve_effort", "train_tokenizer",
]
