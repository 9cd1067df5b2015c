"""Published planning results beside ours: the questions, the answers, and the tables and figures made of them.

`questions` holds what was published, `answers` asks both planners, `tables` writes Markdown, `figures` draws. The
command `hpgo reproduce` fills the tables of `PLANNER_REPRODUCTION.md`.
"""
