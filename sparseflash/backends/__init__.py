"""Backends: what runs a problem. `protocol` says what each is, `registry` lists them."""
