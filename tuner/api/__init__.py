"""The Python API: the functions that the commands call, given a recipe as a file, a shipped name or a mapping.

Each raises what its command reports, as children of TunerError. With ``quiet`` warnings alone go to stderr. A module
holds what loads the same libraries: `tuner` imports the one whose function is asked for.
"""
