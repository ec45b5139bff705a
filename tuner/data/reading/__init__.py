"""Files to records to examples."""
