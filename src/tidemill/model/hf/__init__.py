"""The model behind Hugging Face's Auto classes: configuration, causal language model with `generate()`, tokenizer.

Does: load and save the package's model folders, forward with loss and padding masks, generation over a cache of
constant-size states and latents, chat prompts in which a message cannot spell a control token. Does not: serving
(tidemill.engine is the fast path), devices other than the CPU. Needs the extra `hf`.
"""

from tidemill.core.errors import SetupError

try:
    import transformers  # noqa: F401
except ImportError as e:
    raise SetupError("transformers is not installed", remedy="pip install 'tidemill[hf]'") from e

from tidemill.model.hf.cache import HybridCache
from tidemill.model.hf.configuration import K3Config, KimiLinearConfig
from tidemill.model.hf.modeling import K3ForCausalLM, KimiLinearForCausalLM
from tidemill.model.hf.tokenization import TidemillTokenizer

__all__ = ["HybridCache", "K3Config", "K3ForCausalLM", "KimiLinearConfig", "KimiLinearForCausalLM",
           "TidemillTokenizer"]
