"""A mask in the tiles of a kernel: cut, merged or gathered out of the blocks of a schedule."""
