"""A model folder as one GGUF file for llama.cpp and other readers, and such a file as a model folder."""

from tidemill.model.chat.template import chat_template
from tidemill.model.gguf.exporting import DenseKind, ExpertKind, export_gguf
from tidemill.model.gguf.importing import import_gguf

__all__ = ["DenseKind", "ExpertKind", "chat_template", "export_gguf", "import_gguf"]
