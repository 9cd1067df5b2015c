"""Uneven hosts in a row: who takes which slice of a model, so that the slowest stage or transfer is short.

PipeEdge's three files, or a `Profile` and a `Cluster` of mixed devices, become the same question: a chain of layers,
groups of hosts that are alike, and the links between the groups.
"""
