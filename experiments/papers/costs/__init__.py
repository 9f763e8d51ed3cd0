"""Measuring what the terms of the softmax cost: calls, their gate, and the rows."""
