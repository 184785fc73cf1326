"""For Hugging Face's Auto classes; needs `pip install tidemill[hf]`."""

from tidemill.model.hf import K3Config

__all__ = ["K3Config"]
