"""Lowest level of the code: messages, numbers, files and checks that all other packages use."""
