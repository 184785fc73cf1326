"""For Hugging Face's Auto classes; needs `pip install tidemill[hf]`."""

from tidemill.model.hf import TidemillTokenizer

__all__ = ["TidemillTokenizer"]
