"""State on disk: committed whole or not at all, hashed, free of pickles, loadable at any world size."""
