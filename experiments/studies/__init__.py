"""Studies of the papers, one module each: what is measured, how, and its tables and figures."""
