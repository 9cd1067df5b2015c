"""Entry point that makes `python -m hpgo` run the command `hpgo`."""

from hpgo.cli.entry import hpgo

hpgo()
