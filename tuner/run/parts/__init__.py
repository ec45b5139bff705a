"""What some launches have besides the spine, each a file of its own and a line of ``listed.PARTS``."""
