"""How commands end, and how rows, numbers and times look in a terminal."""
