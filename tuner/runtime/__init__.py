"""The machine: durable files, locks, processes, devices, signals and the console. Knows nothing of recipes."""
