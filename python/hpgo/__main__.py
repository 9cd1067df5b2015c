"""`python -m hpgo` is the command `hpgo`."""

from hpgo.cli.entry import hpgo

hpgo()
