"""Ways to share a transformer among GPUs, and what each costs: time and memory by named terms."""
