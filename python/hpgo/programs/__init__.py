"""Schedules, the stages that they run, and the part of each rank. Nothing here has a clock: `hpgo.timing` adds one."""
