"""Text in, tokens out and back: tokenizer files, streaming detokenization, stop strings, chat templates."""

from typing import TYPE_CHECKING, Any

from dragoman_text.budget import TemplateLimits
from dragoman_text.detokenize import StreamDetokenizer
from dragoman_text.files import TokenizerFiles, TokenizerFilesError
from dragoman_text.stop import StopMatcher, validate_stops
from dragoman_text.tokenizer import TextTokenizer, TextTooLong, byte_tokenizer_files

if TYPE_CHECKING:
    from dragoman_text.chat import ChatTemplate, TemplateError

__all__ = [
    "ChatTemplate",
    "StopMatcher",
    "StreamDetokenizer",
    "TemplateError",
    "TemplateLimits",
    "TextTokenizer",
    "TextTooLong",
    "TokenizerFiles",
    "TokenizerFilesError",
    "byte_tokenizer_files",
    "validate_stops",
]


def __getattr__(name: str) -> Any:
    """Chat templates when first asked for: an engine process has no use for them, and Jinja takes a while to import."""
    if name not in ("ChatTemplate", "TemplateError"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dragoman_text import chat

    return getattr(chat, name)
