"""What is learned: each kind of the recipe's `method` is a file of its name here."""
