"""Scripts that make, measure and check things around the package; none is part of it."""
