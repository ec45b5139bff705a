"""Looking at runs, finished or not: what their directories tell, beside each other, and as curves."""
