"""What `tuner init` proposes for 51 kinds of rows, with the values that are right."""
