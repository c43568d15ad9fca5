"""PyTorch's native libraries, loaded beside the engine's own imports: their constructors take as long as those and need no interpreter.

An import loads a library while it holds the interpreter's lock, so that nothing goes on beside it; a thread that calls the linker does not.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

# Packages with native code that an engine and Triton import in any case, then those of the standard library that some builds of Python
# have as files of their own. The linker has a lock too, and holds it while a library's constructors run: an import of native code would
# wait there, with the interpreter's lock in its hands.
_PACKAGES = ("numpy", "google.protobuf.descriptor_pool", "tokenizers", "llguidance", "psutil", "msgpack")
_OF_PYTHON = (
    "binascii", "bisect", "bz2", "contextvars", "csv", "ctypes", "datetime", "decimal", "dis", "hashlib", "heapq", "json", "lzma", "mmap",
    "pickle", "queue", "random", "resource", "select", "socket", "statistics", "struct", "subprocess", "typing", "uuid", "zlib",
)  # fmt: skip


class TorchLibraries:
    """The loading of PyTorch's libraries in a thread, begun now. Its import finds them there and says itself what is wrong with one."""

    def __init__(
        self, libraries: Sequence[tuple[Path, int]] | None = None, note: Callable[[str], None] = lambda _: None
    ) -> None:
        """`libraries`: each with how it is opened (dlopen(3)); PyTorch's own otherwise. `note` is told when something is done.

        Raises ImportError where a package is not installed that an engine needs.
        """
        for name in _PACKAGES:
            importlib.import_module(name)
        for name in _OF_PYTHON:
            with suppress(ImportError):  # a Python built without lzma or bz2 has all that an engine needs
                importlib.import_module(name)
        found = list(torch_libraries()) if libraries is None else libraries
        # Not a daemon: a process that ends while constructors run can crash.
        self._thread = threading.Thread(target=_load, args=(found, note), name="torch-libraries")
        self._thread.start()

    @property
    def is_loading(self) -> bool:
        """Whether there is time left beside it."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Until they are there, or one could not be loaded."""
        self._thread.join()


def torch_libraries() -> Iterator[tuple[Path, int]]:
    """Files and modes in the order in which PyTorch's import opens them, as far as it matters; none where it is not installed.

    The first is global so that what it needs serves all; the linker library is one that others would find elsewhere by
    LD_LIBRARY_PATH. What the libraries and PyTorch's own module define alike is unique in a process, or tables and names of types:
    it does not matter whose is found.
    """
    spec = None
    with suppress(ImportError, ValueError):
        spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    package = Path(spec.submodule_search_locations[0])
    yield package / "lib" / "libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL
    for path in sorted(package.parent.glob("nvidia/*/lib/libnvJitLink.so.*[0-9]")):
        yield path, os.RTLD_NOW
    for name in ("libtorch_cpu.so", "libtorch.so"):
        yield package / "lib" / name, os.RTLD_NOW


def _load(libraries: Sequence[tuple[Path, int]], note: Callable[[str], None]) -> None:
    """By the linker's own function: ctypes lets go of the interpreter's lock while that runs, and not while it opens a library itself."""
    try:
        dlopen = ctypes.CDLL(None).dlopen
    except (OSError, AttributeError) as error:  # another system
        logger.debug("PyTorch's libraries are left to its import: %s", error)
        return
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for path, mode in libraries:
        if dlopen(os.fsencode(path), mode) is None:  # a library behind it may need it, as the import will say
            logger.debug("%s is left to PyTorch's import", path)
            return
        note(path.name)
