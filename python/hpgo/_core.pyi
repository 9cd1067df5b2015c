"""The native module. Plain records in, plain records out; the package around it is what people use."""

__version__: str
