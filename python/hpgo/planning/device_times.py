"""Times of a profile on the devices of a cluster: the times on the device's type, or the profile's own and a speed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpgo.hardware.rates import same_card

if TYPE_CHECKING:
    from hpgo.hardware.cluster import Cluster, Device
    from hpgo.model.profile import Profile


def type_of(profile: Profile, device: Device) -> str | None:
    """Return the type of `profile.device_types` that a device is; None if the profile has no times on it.

    Names match as in `hpgo clusters devices`: case, blanks, hyphens and `NVIDIA` do not matter.
    """
    types = profile.device_types
    return device.name if device.name in types else next((name for name in types if same_card(name, device.name)), None)


def types_of_nodes(profile: Profile, cluster: Cluster) -> list[int | None] | None:
    """Return the index in `profile.device_types` of each node's type, None for a type without times.

    None if the profile has times on none of the types: then its own times are divided by the speeds of devices.
    """
    if not profile.device_types:
        return None
    index = {name: at for at, name in enumerate(profile.device_types)}
    # Clusters have few types and up to a million nodes, so each type is looked up once.
    known: dict[str, int | None] = {}
    for name, device in {node.device.name: node.device for node in cluster.nodes}.items():
        found = type_of(profile, device)
        known[name] = None if found is None else index[found]
    types = [known[node.device.name] for node in cluster.nodes]
    return None if all(one is None for one in types) else types


@dataclass
class DeviceTimes:
    """Times of the layers of a profile on devices."""

    profile: Profile
    _known: dict[str, Profile] = field(default_factory=dict, repr=False)

    def on(self, device: Device) -> tuple[Profile, float]:
        """Return the profile on the type of a device, and the speed by which its times are divided there."""
        found = type_of(self.profile, device)
        if found is None:
            return self.profile, device.speed
        if found not in self._known:
            self._known[found] = self.profile.on(found)
        return self._known[found], 1.0
