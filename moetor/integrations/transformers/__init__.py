"""moetor's experts in models of Hugging Face transformers.

Importing this registers "moetor" among transformers' experts functions, so that plain transformers takes it as
`experts_implementation`; and "moetor:eager" and so on, one for each backend of ours.
"""

from .adapters import Adapter, experts_of, register_adapter
from .auto import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
)
from .decode import without_decode_switch
from .methods import attach

__all__ = [
    "Adapter",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSeq2SeqLM",
    "attach",
    "experts_of",
    "register_adapter",
    "without_decode_switch",
]
