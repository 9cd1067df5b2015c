"""Other planners beside hpgo: their own code plans a question, and both plans are evaluated under both objectives.

Each file runs one planner, from a clone of its public repository, and gives `Comparison`s. `python research/peers`
prints the table and fills it into PLANNER_REPRODUCTION.md.
"""
