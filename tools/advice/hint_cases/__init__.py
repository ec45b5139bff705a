"""How each advice comes about, and what it means: a file for each package of the product."""
