"""Simulation of programs, and timelines of simulated or measured runs."""
