"""Files to rows to examples."""
