"""Block masks in the forms of other libraries, and back: one module a peer."""
