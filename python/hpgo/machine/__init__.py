"""What it runs on: devices, machines and the links between them."""
