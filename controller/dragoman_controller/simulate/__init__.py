"""The controller's own admission, placement and quotes against simulated agents, in virtual time."""
