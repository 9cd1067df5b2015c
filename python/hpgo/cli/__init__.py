"""The command `hpgo`: one file a sub-command, loaded only when it is called."""
