"""Generated stubs of other projects' interfaces; run `make protos` to regenerate them."""
