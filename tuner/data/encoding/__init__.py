"""Examples to token ids and masks."""
