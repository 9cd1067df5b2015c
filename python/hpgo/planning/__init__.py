"""Planning: search for plans, comparison of schedules, and chains over hosts of different speed."""
