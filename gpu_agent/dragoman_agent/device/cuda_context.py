"""The context of a CUDA device, made by the driver beside the import of PyTorch, which then finds it. Imports no PyTorch."""

from __future__ import annotations

import logging

from dragoman_agent.pal.host import Host, this_host

logger = logging.getLogger(__name__)


def open_context(index: int, host: Host | None = None) -> bool:
    """Make and retain the primary context of CUDA device `index`, for as long as this process lives; whether it is there.

    Takes 0.2 s on a machine with an H200, without the interpreter's lock. What is in the way is left to PyTorch, which says it better.
    """
    try:
        driver = (host or this_host()).load_driver()
        name, (code, *_) = "cuInit", driver.cuInit(0)
        if not int(code):
            name, (code, *found) = "cuDeviceGet", driver.cuDeviceGet(index)
            if not int(code):
                name, (code, *_) = "cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(*found)
    except Exception as error:  # no package, no library of the driver
        logger.debug("no context beside the import of PyTorch: %s", error)
        return False
    if int(code):
        logger.debug("no context beside the import of PyTorch: %s says %s", name, code)
    return not int(code)
