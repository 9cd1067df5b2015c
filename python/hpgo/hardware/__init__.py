"""Hardware: devices, nodes, the links between them, and the rates of known GPUs."""
