"""The page of a plan: show, change and search for one plan. A level of its own within the package `page`."""
