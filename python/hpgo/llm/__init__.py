"""Parallelism configurations of transformer training: their step time and memory, and the search for the fastest."""
