"""Commands that show or compare runs that have been."""
