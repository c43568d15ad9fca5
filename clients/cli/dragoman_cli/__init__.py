"""The command line of Dragoman."""
