"""Selections: block masks made on the device, and what makes them from lengths and lists."""
