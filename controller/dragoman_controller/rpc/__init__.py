"""Servicers: messages to decisions and back, nothing else."""
