"""A worker group: the door process that peers see, and the engine processes behind it."""
