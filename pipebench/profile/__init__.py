"""What every layer costs: measured here, computed for a device that isn't here, or read from a file."""

from pipebench.profile.analytic import analytic_profile
from pipebench.profile.choose import fitting, is_measured, load_profile, profile_for
from pipebench.profile.devices import DEVICES, DeviceSpec, find_device
from pipebench.profile.graph_txt import read_graph_txt, write_graph_txt
from pipebench.profile.measure import measured_profile
from pipebench.profile.model import LayerProfile, Profile

__all__ = [
    "DEVICES",
    "DeviceSpec",
    "LayerProfile",
    "Profile",
    "analytic_profile",
    "find_device",
    "fitting",
    "is_measured",
    "load_profile",
    "measured_profile",
    "profile_for",
    "read_graph_txt",
    "write_graph_txt",
]
