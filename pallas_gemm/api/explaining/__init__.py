"""What would compute a program, and why: `explain`."""
