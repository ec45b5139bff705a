"""Names of the figures of a step, as metrics.jsonl has them."""

CLOCKED = ("step_s", "data_s", "tok_per_s", "trained_per_s", "mem_gib", "data_wait", "mfu")
"""What the clock and the machine say in a line of metrics.jsonl; the rest follows from the recipe."""
