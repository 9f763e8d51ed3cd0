"""The backward on Hopper: a pass over the columns of a mask, and one over its rows."""
