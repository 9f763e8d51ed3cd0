"""The tasks of the Long Range Arena, one file each: official files or a generator -> arrays."""
