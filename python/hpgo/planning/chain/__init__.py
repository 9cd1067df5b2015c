"""Partition a chain of layers over hosts of different speed, so that the slowest stage or transfer is short.

PipeEdge's three files, or a `Profile` and a `Cluster` of mixed devices, become the same problem: a chain of layers,
groups of equal hosts, and the links between the groups.
"""
