"""The way from a question to a plan: search, choice between schedules, chains over uneven hosts."""
