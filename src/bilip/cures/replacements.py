"""Third rung: stable code in the place of a library's own, for the same function and the same parameters."""
