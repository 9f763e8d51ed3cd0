"""What stands to the right of `mask >> transform`, one family a file."""
