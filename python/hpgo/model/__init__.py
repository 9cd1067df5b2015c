"""What is to be trained: layers with their costs, read from files or built in, and where they may be cut."""
