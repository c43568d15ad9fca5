"""Text in, tokens out and back: tokenizer files, streaming detokenization, stop strings, chat templates."""

from dragoman_text.budget import TemplateLimits
from dragoman_text.chat import ChatTemplate, TemplateError
from dragoman_text.detokenize import StreamDetokenizer
from dragoman_text.files import TokenizerFiles, TokenizerFilesError
from dragoman_text.stop import StopMatcher, validate_stops
from dragoman_text.tokenizer import TextTokenizer, TextTooLong, byte_tokenizer_files

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
