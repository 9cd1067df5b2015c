"""Plans as text and figures."""
