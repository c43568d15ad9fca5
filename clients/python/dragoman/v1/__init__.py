"""Generated protocol stubs; run `make protos` to regenerate them."""
