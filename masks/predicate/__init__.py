"""Masks from a user's own function of (query, key), exact without looking at every pair."""
