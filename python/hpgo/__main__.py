"""`python -m hpgo` is the command `hpgo`."""

from hpgo.cli.main import main

main()
