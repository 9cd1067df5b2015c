"""Models to train: layers with their costs, built in or read from files, and the points where they may be cut."""
