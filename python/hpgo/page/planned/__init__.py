"""The plan's page: one plan to look at, to change and to search for; a floor of its own within the page."""
