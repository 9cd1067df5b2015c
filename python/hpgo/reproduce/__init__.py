"""Published planning results beside ours: the questions, the answers of both planners, and tables of them.

The command `hpgo reproduce` prints the tables. `research/reproduction.py` fills them into PLANNER_REPRODUCTION.md.
"""
