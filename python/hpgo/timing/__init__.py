"""Programs on a clock: the simulator's entrance and the timelines that it, or a real run, makes."""
