"""The engine: scheduler, batch, loop and output; one process that owns the device."""
