"""What happens around and between the steps of a launch, one task a file; launch_tasks.py has their order."""
