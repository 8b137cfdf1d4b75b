"""The catalogue of devices, and every constant of the analytic profile with where it comes from.

Rates are for 32-bit floating point without tensor cores, what the papers trained with.
"""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from pipebench.errors import ProfileError, choice

# Fraction of the peak memory bandwidth that a streaming kernel reaches. Published: 790 of 900 GB/s on a V100
# (cudaMemcpy; paranumal.com, "Rough-n-Ready Roofline: NVIDIA V100 edition"). Assumed for the other devices.
MEMORY_EFFICIENCY = 0.88
# Fraction of the peak rate of a matrix product. Assumed, typical of mixed shapes: large square cuBLAS products reach
# about 0.9, those with one side as short as a minibatch well below. Not fitted.
GEMM_EFFICIENCY = 0.75
# Seconds between kernels that the host needs to issue one. Assumed: eager PyTorch issues about 100,000 operations per
# second; the bare launch is about 4 us.
LAUNCH_S = 1e-5
# Winograd's F(4x4, 3x3), which cuDNN runs for 3x3 convolutions of stride 1 as three passes: a tile of 4x4 outputs takes
# 6x6 products per channel pair instead of 16 * 9. Published: Lavin and Gray, "Fast algorithms for convolutional neural
# networks" (2016). That cuDNN picks it was seen in the PipeDream artifact's VGG-16 profile (V100, 128 images), whose
# convolutions run at up to three times the card's peak rate.
WINOGRAD_TILE, WINOGRAD_PATCH, WINOGRAD_KERNEL = 4, 6, 3
# Fitted, both on the first two convolutions of that same profile, which is no independent judge of them: the share of
# the device's memory that Winograd's transformed tensors may take (there, 3.7 GB are taken and 7.4 GB are not), and the
# channels that a convolution's kernels multiply at a time (3 cost as much as 32, and Winograd isn't worth it for them).
WORKSPACE_FRACTION = 0.25
CHANNEL_BLOCK = 32
# Host to device, pinned memory. Assumed: 12 of the 15.75 GB/s of PCIe 3.0 x16, the same fraction of later versions.
_PCIE3, _PCIE4, _PCIE5 = 12e9, 24e9, 48e9


@dataclass(frozen=True)
class DeviceSpec:
    """What a device can do at its best, as published.

    Attributes:
        name: short name, as clusters use it.
        flops_per_s: peak rate of 32-bit floating point.
        memory_bytes_per_s: peak bandwidth of its own memory.
        memory_bytes: size of its own memory.
        host_bytes_per_s: bandwidth from the host's memory to its own; assumed.
        source: where the published numbers come from.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    host_bytes_per_s: float
    source: str


_GB = 10**9
DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        # PipeDream's cluster A is Azure NC24s_v3, which has the PCIe card; SXM2 (15.7 Tflop/s) differs by its clock.
        DeviceSpec("V100", 14.0e12, 900e9, 16 * _GB, _PCIE3, "NVIDIA V100 datasheet, PCIe 16 GB"),
        # The papers write Titan X; assumed to be the Pascal card, whose name that is, not the older GTX Titan X.
        DeviceSpec("Titan X", 11.0e12, 480e9, 12 * _GB, _PCIE3, "NVIDIA Titan X (Pascal) announcement, July 2016"),
        DeviceSpec("1080 Ti", 11.3e12, 484e9, 11 * _GB, _PCIE3, "NVIDIA GeForce GTX 1080 Ti specifications"),
        DeviceSpec("2080 Ti", 13.4e12, 616e9, 11 * _GB, _PCIE3, "NVIDIA Turing whitepaper, reference card"),
        DeviceSpec("K80", 4.37e12, 240e9, 12 * _GB, _PCIE3, "NVIDIA Tesla K80 datasheet, one of its two GPUs, boost"),
        DeviceSpec("A100", 19.5e12, 1555e9, 40 * _GB, _PCIE4, "NVIDIA A100 datasheet, SXM4 40 GB"),
        DeviceSpec("H100", 67e12, 3350e9, 80 * _GB, _PCIE5, "NVIDIA H100 datasheet, SXM5 80 GB"),
        DeviceSpec("H200", 67e12, 4800e9, 141 * _GB, _PCIE5, "NVIDIA H200 datasheet, SXM5 141 GB"),
    )
}


def find_device(name: str) -> DeviceSpec:
    """Return the catalogue's entry for a device; case, spaces and `-` don't matter.

    Raises:
        ProfileError: no such device.
    """
    wanted = _plain(name)
    for spec in DEVICES.values():
        if _plain(spec.name) == wanted:
            return spec
    raise ProfileError(f"no analytic profile for device: {choice(name, DEVICES)}")


def local_device_name(device: torch.device) -> str:
    """Return what a device of this machine is: the GPU's name, or the processor's and torch's number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
