"""Job folders: everything that starts a plan with its framework on a cluster, beginning with a smoke run."""
