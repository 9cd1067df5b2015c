"""The import name of the original HPGO planner."""

from hpgo.compat import *
