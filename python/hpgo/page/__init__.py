"""The local web pages of `hpgo serve`, whose addresses contain all settings."""
