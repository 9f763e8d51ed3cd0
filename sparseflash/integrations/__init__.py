"""Models of other libraries. Import the module of the library: each needs that library only."""
