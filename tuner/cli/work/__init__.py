"""What commands do once their arguments are read: loaded by the one that runs, never for its help or a completion."""
