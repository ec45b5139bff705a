"""What the user wants: the typed recipe, loaded without side effects."""
