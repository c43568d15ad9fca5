"""Model files, configurations and forward passes."""
