"""The local page of `hpgo serve`: schedules side by side, with every setting in the address."""
