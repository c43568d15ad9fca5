"""The paged KV cache's bookkeeping: blocks, prefix reuse, hashing. Torch-free."""
