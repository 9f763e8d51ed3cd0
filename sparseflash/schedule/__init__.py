"""Schedules: which blocks a kernel walks over, and the same cut to its tiles."""
