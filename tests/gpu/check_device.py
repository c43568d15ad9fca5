"""The conformance suite of tests/agent/device/conformance on a GPU: the CUDA backend, and the HIP backend's code on the same card.

PYTHONPATH=. python tests/gpu/check_device.py      exit 1 when a case is off
"""

from __future__ import annotations

import sys

from tests.agent.device.conformance.run import main

if __name__ == "__main__":
    sys.exit(main(["cuda"]))
