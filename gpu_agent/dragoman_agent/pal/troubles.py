"""Every device problem a user can meet: what is shown, why it happens, what to do. docs/troubleshooting.md lists the same."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem. `what` and `do` hold {placeholders}; `why` is for the page."""

    what: str
    why: str
    do: str

    def text(self, **parts: object) -> str:
        """The line a user sees: what happened, then what to do."""
        return f"{self.what.format(**parts)}; {self.do.format(**parts)}"


NO_GPU: Final = Trouble(
    "this machine has no NVIDIA GPU (none on the PCI bus, libcuda was not found)",
    "there is none",
    "none is needed, the CPU serves, more slowly",
)
NO_DRIVER: Final = Trouble(
    "no NVIDIA driver on this machine (libcuda was not found)",
    "the card is there and the driver is not",
    "install the NVIDIA driver",
)
NO_DRIVER_IN_CONTAINER: Final = Trouble(
    "no NVIDIA driver in this container (libcuda was not found)",
    "the container was started without the GPU",
    "pass the GPU through: docker run --gpus all",
)
NO_DRIVER_IN_WSL: Final = Trouble(
    "no NVIDIA driver in this WSL system (libcuda was not found)",
    "WSL takes the driver of Windows",
    "install the NVIDIA driver on Windows, none inside WSL, then run: wsl --shutdown",
)
OTHER_KERNEL_DRIVER: Final = Trouble(
    "the card is bound to the kernel driver {driver}",
    "another driver, or a virtual machine, has the card",
    "install the NVIDIA driver, or bind the card to it",
)
NO_PERMISSION: Final = Trouble(
    "user {user} may not open {node} (mode {mode}, owner {owner}, group {group})",
    "the rights on the device node",
    "give the user read and write access, such as: sudo usermod -aG {group} {user}, and log in again",
)
NO_COMPUTE_CAPABILITY: Final = Trouble(
    "NVIDIA_DRIVER_CAPABILITIES={value} leaves out compute, so this container has no CUDA",
    "the container was started with too few driver capabilities",
    "start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
)
NO_BINDINGS: Final = Trouble(
    "the package cuda-bindings is not installed",
    "the agent was installed for a platform without CUDA",
    "install it: {pip_install} 'dragoman[agent]'",
)
HIDDEN: Final = Trouble(
    "hidden by CUDA_VISIBLE_DEVICES={value}",
    "the variable names other cards, or none",
    "unset it, or name this card",
)
NOT_LISTED: Final = Trouble(
    "the driver does not list this card",
    "the container was given other cards, or the card has failed",
    "pass it through, or look into the kernel log: dmesg | grep NVRM",
)
PROHIBITED: Final = Trouble(
    "the card's compute mode is prohibited",
    "an administrator closed it to computation",
    "open it: sudo nvidia-smi -i {index} -c 0",
)
FAILED_HALF_WAY: Final = Trouble(
    "the NVIDIA driver failed at {call} with {code} ({number})",
    "the card or its driver is in a bad state",
    "see the steps with: dragoman probe --log-level debug; then look into the kernel log (dmesg | grep NVRM) and reset the card or reboot",
)
DRIVER_TOO_OLD: Final = Trouble(
    "the NVIDIA driver supports CUDA {have}, the installed torch was built for CUDA {need}",
    "the driver is too old",
    "update the NVIDIA driver to release {release} or newer, or install a torch that was built for CUDA {major}",
)
TORCH_WITHOUT_CUDA: Final = Trouble(
    "the installed torch was built without CUDA",
    "a CPU-only torch was installed",
    "install the torch for CUDA: {pip_install} --force-reinstall torch",
)
TORCH_OF_ANOTHER_MAKER: Final = Trouble(
    "the installed torch was built for {built}, this card needs one for {needed}",
    "a torch serves the cards of one maker",
    "install that torch to use this card, an untested backend, or leave the work to the other devices",
)
NOT_LISTED_BY_TORCH: Final = Trouble(
    "the installed torch for {needed} does not list this card ({reason})",
    "its driver is missing, or torch does not support the card",
    "install the maker's driver, and see what torch says: dragoman probe --log-level debug",
)
DRIVER_LACKS_FUNCTION: Final = Trouble(
    "the NVIDIA driver lacks {call}",
    "the driver is too old",
    "update the NVIDIA driver to release 580 or newer",
)
ANSWERED: Final = Trouble(
    "the NVIDIA driver answered {code} ({number})",
    "the driver gives no other reason",
    "update the NVIDIA driver, and look into the kernel log: dmesg | grep NVRM",
)
# By the driver's own code, which stays in the message.
DRIVER_ANSWERS: Final = MappingProxyType(
    {
        "CUDA_ERROR_STUB_LIBRARY": Trouble(
            "the NVIDIA driver answered CUDA_ERROR_STUB_LIBRARY (34)",
            "the libcuda found is a stub for linking",
            "take the folder that ends in stubs out of LD_LIBRARY_PATH",
        ),
        "CUDA_ERROR_DEVICE_UNAVAILABLE": Trouble(
            "the NVIDIA driver answered CUDA_ERROR_DEVICE_UNAVAILABLE (46)",
            "another process has the card for itself (exclusive mode)",
            "stop that process, or: sudo nvidia-smi -c 0",
        ),
        "CUDA_ERROR_NO_DEVICE": Trouble(
            "the NVIDIA driver answered CUDA_ERROR_NO_DEVICE (100)",
            "the driver sees no GPU",
            "check CUDA_VISIBLE_DEVICES and that the container was given a GPU",
        ),
        "CUDA_ERROR_OPERATING_SYSTEM": Trouble(
            "the NVIDIA driver answered CUDA_ERROR_OPERATING_SYSTEM (304)",
            "the device nodes cannot be used",
            "check the rights on /dev/nvidia* (in a container, pass the GPU through)",
        ),
        "CUDA_ERROR_SYSTEM_NOT_READY": Trouble(
            "the NVIDIA driver answered CUDA_ERROR_SYSTEM_NOT_READY (802)",
            "cards joined by NVSwitch wait for their fabric manager",
            "start it: sudo systemctl start nvidia-fabricmanager",
        ),
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": Trouble(
            "the NVIDIA driver answered CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)",
            "the loaded kernel module and the user library have different versions",
            "reboot after a driver update",
        ),
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": Trouble(
            "the NVIDIA driver answered CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE (804)",
            "a forward-compatibility library is found first, and this card does not take it",
            "remove the package cuda-compat, or take its folder out of LD_LIBRARY_PATH",
        ),
        "CUDA_ERROR_MPS_CONNECTION_FAILED": Trouble(
            "the NVIDIA driver answered CUDA_ERROR_MPS_CONNECTION_FAILED (805)",
            "the multi-process service does not answer",
            "start it: nvidia-cuda-mps-control -d, or unset CUDA_MPS_PIPE_DIRECTORY",
        ),
        "CUDA_ERROR_UNKNOWN": Trouble(
            "the NVIDIA driver answered CUDA_ERROR_UNKNOWN (999)",
            "often the module nvidia_uvm after a suspend",
            "reload it: sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm, or reboot",
        ),
    }
)

# What limits a device without ruling it out.
UNTESTED_BACKEND: Final = Trouble(
    "the {kind} backend is untested: it is written and compiled, and has never run on such a card",
    "the project had no such card",
    "compare its answers with those of --device cpu before you rely on it",
)
L2_NOT_REPORTED: Final = Trouble(
    "the driver does not report the size of the L2 cache",
    "the driver answers 0, as under some virtual machines",
    "dragoman probe --full measures it, until then no choice rests on it",
)
WSL_NOT_PINNED: Final = Trouble(
    "memory cannot be pinned under WSL: copies between host and card are slower and do not overlap computation",
    "WSL limits pinned memory, and the driver reports no host registration",
    "nothing need be done, Linux without WSL is quicker",
)
WSL_PINNED_LIMITED: Final = Trouble(
    "pinned memory is limited under WSL",
    "WSL limits pinned memory",
    "keep large host buffers small, or run on Linux without WSL",
)
NVML_NOT_IN_CONTAINER: Final = Trouble(
    "NVIDIA_DRIVER_CAPABILITIES={value} leaves out utility, so this container has no NVML: free memory, link, power and clocks cannot be seen",
    "the container was started with too few driver capabilities",
    "start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
)
NVML_MISSING: Final = Trouble(
    "NVML cannot be used ({reason}): free memory, link, power and clocks cannot be seen",
    "the driver's library libnvidia-ml is missing or does not match the kernel module",
    "install the NVIDIA driver's utilities, and reboot after a driver update",
)
NVML_REFUSED: Final = Trouble(
    "NVML did not say {names} ({reason})",
    "the counter needs a permission, or the card does not have it",
    "nothing need be done, what rests on it is left out",
)
NARROW_LINK: Final = Trouble(
    "the PCIe link runs at x{width} of x{max_width}",
    "a slot or riser with fewer lanes",
    "put the card into a wider slot, loading and KV offload are slower until then",
)
MPS_NOT_RUNNING: Final = Trouble(
    "{name} is set, and this process does not run under the multi-process service",
    "the limit acts only under it",
    "start it: nvidia-cuda-mps-control -d, or unset the variable",
)
BAD_LIMIT: Final = Trouble(
    "{name}={value} is not {expected} and is not applied",
    "a typing mistake",
    "correct it, or unset it",
)
