"""Floor 0: words, numbers, files and errors that every other room uses."""
