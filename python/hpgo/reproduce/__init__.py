"""Comparison with published planning results: problems, results of both planners, and tables.

The command `hpgo reproduce` prints the tables. `research/reproduction.py` fills them into PLANNER_REPRODUCTION.md.
"""
