"""Rows to prepared data: workers, the cache, the packing plan."""
