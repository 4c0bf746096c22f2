"""DDTree speculative decoding for Kimi-K2-class models.

`LLM` loads a model and continues prompts; `kdtree_engine.ddtree` builds and walks draft trees;
`kdtree_engine.kdtr` reads and writes named arrays; `kdtree_engine.reference` restates every
computation in numpy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from kdtree_engine.llm import LLM
    from kdtree_engine.outputs import (
        ChatChunk,
        ChatOutput,
        CompletionOutput,
        RequestOutput,
        StreamChunk,
    )
    from kdtree_engine.sampling_params import SamplingParams
    from kdtree_engine.tokenizer import Tokenizer
    from kdtree_engine.tool_calls import BrokenCall, ToolCall

__all__ = [
    "LLM",
    "BrokenCall",
    "ChatChunk",
    "ChatOutput",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "Tokenizer",
    "ToolCall",
    "__version__",
]

_MODULE_OF = {
    "LLM": "llm",
    "BrokenCall": "tool_calls",
    "ChatChunk": "outputs",
    "ChatOutput": "outputs",
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
    "StreamChunk": "outputs",
    "SamplingParams": "sampling_params",
    "Tokenizer": "tokenizer",
    "ToolCall": "tool_calls",
}


def __getattr__(name: str) -> Any:
    """Loads a public name on first use: kdtr and reference then need no compiled module."""
    if name == "__version__":
        return _version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kdtree-engine")
    except PackageNotFoundError:  # run from a source tree
        return "0+unknown"
