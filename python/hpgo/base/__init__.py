"""Layer 0: words, numbers, files and errors that every other package uses."""
