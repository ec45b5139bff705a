"""Directories in object stores: published in commits, fetched whole, held by one writer."""
