"""What a run costs, measured on a few of its own steps: time and memory by part."""
