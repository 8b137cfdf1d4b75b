"""The catalogue of devices with their published peaks; `efficiencies.py` has the fractions of them that are reached.

Rates are for 32-bit floating point without tensor cores, with which the papers trained. 16-bit rates are those of
tensor cores that add in 32 bits, as cuBLAS and cuDNN use them. Assumed: without tensor cores for a type, 32-bit rates
hold.
"""

import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipebench.cluster import LOCAL, Cluster
from pipebench.errors import DeviceError, choice
from pipebench.profile.efficiencies import AMPERE, HOPPER, LAUNCH_S, SHIPPED, Efficiencies
from pipebench.recipe.schema import EngineRecipe
from pipebench.zoo.late import torch

# Bytes per second from pinned host memory to a device. Assumed: 12 of the 15.75 GB/s of PCIe 3.0 x16, and the same
# fraction of later versions.
_PCIE3, _PCIE4, _PCIE5 = 12e9, 24e9, 48e9


@dataclass(frozen=True)
class DeviceSpec:
    """A device's published peaks."""

    name: str  # short name, as clusters use it
    flops_per_s: float  # peak rate of 32-bit floating point
    memory_bytes_per_s: float  # peak bandwidth of its own memory
    memory_bytes: int
    num_multiprocessors: int  # each computes one tile of a matrix product at a time
    host_bytes_per_s: float  # bandwidth from host memory to its own; assumed
    source: str  # where the published numbers come from
    fp16_flops_per_s: float = 0.0  # peak rate of tensor cores, without sparsity; 0 if it has none for fp16
    bf16_flops_per_s: float = 0.0  # the same for bf16
    tf32_flops_per_s: float = 0.0  # the same for 32-bit floating point rounded to TF32, if `allows_tf32`
    allows_tf32: bool = False
    efficiencies: Efficiencies = SHIPPED
    launch_s: float = LAUNCH_S  # seconds that its host needs to issue one kernel; no kernel takes less
    pause_s: float = 0.0  # seconds that it is idle after every kernel that the host issues

    def tensor_flops_per_s(self, dtype: "torch.dtype | None") -> float:
        """Return the peak rate of tensor cores for a type; 0 if it has none."""
        if dtype is torch.float16:
            return self.fp16_flops_per_s
        if dtype is torch.float32 and self.allows_tf32:
            return self.tf32_flops_per_s
        return self.bf16_flops_per_s if dtype is torch.bfloat16 else 0.0


_GB = 10**9
# Rates without sparsity, and the efficiencies of their libraries.
_AMPERE: dict[str, Any] = {
    **dict.fromkeys(("fp16_flops_per_s", "bf16_flops_per_s"), 312e12),
    "tf32_flops_per_s": 156e12,
    "efficiencies": AMPERE,
}
_HOPPER: dict[str, Any] = {
    **dict.fromkeys(("fp16_flops_per_s", "bf16_flops_per_s"), 989e12),
    "tf32_flops_per_s": 494.7e12,
    "efficiencies": HOPPER,
}
DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        # PipeDream's cluster A is Azure NC24s_v3, which has the PCIe card; SXM2 (15.7 Tflop/s) differs by its clock.
        DeviceSpec("V100", 14.0e12, 900e9, 16 * _GB, 80, _PCIE3, "NVIDIA V100 datasheet, PCIe 16 GB", 112e12),
        # The papers write Titan X. Assumed: the Pascal card, which has that name, not the older GTX Titan X.
        DeviceSpec("Titan X", 11.0e12, 480e9, 12 * _GB, 28, _PCIE3, "NVIDIA Titan X (Pascal) announcement, July 2016"),
        DeviceSpec("1080 Ti", 11.3e12, 484e9, 11 * _GB, 28, _PCIE3, "NVIDIA GeForce GTX 1080 Ti specifications"),
        DeviceSpec(
            "2080 Ti", 13.4e12, 616e9, 11 * _GB, 68, _PCIE3, "NVIDIA Turing whitepaper, reference card", 53.8e12
        ),
        # One of the board's two GPUs, at its boost clock; clouds run it nearer to its base clock, 2.8 Tflop/s.
        DeviceSpec("K80", 4.37e12, 240e9, 12 * _GB, 13, _PCIE3, "NVIDIA Tesla K80 datasheet, one GPU of two, boost"),
        DeviceSpec("A100", 19.5e12, 1555e9, 40 * _GB, 108, _PCIE4, "NVIDIA A100 datasheet, SXM4 40 GB", **_AMPERE),
        DeviceSpec("A100 80GB", 19.5e12, 2039e9, 80 * _GB, 108, _PCIE4, "NVIDIA A100 datasheet, SXM4 80 GB", **_AMPERE),
        DeviceSpec("H100", 67e12, 3350e9, 80 * _GB, 132, _PCIE5, "NVIDIA H100 datasheet, SXM5 80 GB", **_HOPPER),
        DeviceSpec("H200", 67e12, 4800e9, 141 * _GB, 132, _PCIE5, "NVIDIA H200 datasheet, SXM5 141 GB", **_HOPPER),
    )
}


def is_computed(timing: str, cluster: Cluster) -> bool:
    """Return whether `engine.timing` asks for times computed from the catalogue's entry for the cluster's device."""
    return timing == "analytic" or (timing == "auto" and cluster.device != LOCAL)


def find_device(name: str) -> DeviceSpec:
    """Return a device's entry (case, spaces and `-` don't matter); raises a DeviceError if there is none."""
    wanted = _plain(name)
    for spec in DEVICES.values():
        if _plain(spec.name) == wanted:
            return spec
    needed = "without a profile file as engine.timing, the device must be in the catalogue"
    raise DeviceError(f"{needed}: {choice(name, DEVICES)}")


def device_of(cluster: Cluster, engine: EngineRecipe | None = None) -> DeviceSpec:
    """Return the catalogue's entry for a cluster's device, with the cluster's launch and pause times.

    `engine` says whether 32-bit products may use TF32 and whether kernels must be deterministic; None: its defaults.

    Raises:
        DeviceError: no such device.
    """
    spec = find_device(cluster.device)
    launch_s = spec.launch_s if cluster.launch_s is None else cluster.launch_s
    known, engine = spec.efficiencies, engine or EngineRecipe()
    return replace(
        spec,
        launch_s=launch_s,
        pause_s=cluster.pause_s or 0.0,
        allows_tf32=engine.tf32 and bool(spec.tf32_flops_per_s),
        efficiencies=known if engine.deterministic else known.not_deterministic(),
    )


def local_device_name(device: "torch.device") -> str:
    """Return the GPU's name, or the processor's with torch's number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{processor()}, {torch.get_num_threads()} threads"


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def processor() -> str:
    """Return the processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
