"""The native module. Plain records in, plain records out; the package around it is what people use."""

from hpgo.profile import Profile

__version__: str

def states(
    profile: Profile, bound: int
) -> tuple[str | None, list[tuple[list[int], list[tuple[float, float, float, float, float]]]]]: ...
