"""The OpenAI-compatible HTTP gateway of Dragoman: HTTP in, gRPC out."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("dragoman")
except PackageNotFoundError:  # a source tree that was not installed
    VERSION = "0.0.0+source"
