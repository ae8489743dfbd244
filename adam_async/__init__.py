"""adam_async."""
