"""Who does what in which order, without a clock: schedules, stages, and each rank's part."""
