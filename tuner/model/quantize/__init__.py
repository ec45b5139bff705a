"""Frozen weights of 4 and 8 bits: codes and scales as pure functions of a weight, and products with them."""
