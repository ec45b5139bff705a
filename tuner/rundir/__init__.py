"""Run directories: their layout, record and metrics, which checkpoint is meant, comparisons and curves."""
