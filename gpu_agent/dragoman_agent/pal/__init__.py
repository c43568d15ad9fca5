"""The hardware layer: probe, profile, plan and decisions."""
