"""Process chaos: a real mesh under load, with processes that are killed and stopped and links that fail."""
