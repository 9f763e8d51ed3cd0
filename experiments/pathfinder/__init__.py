"""Pathfinder images (Linsley et al., NeurIPS 2018; Kim et al., ICLR 2020) for the sizes of the Long
Range Arena. The original algorithm, with every geometric step in tables."""
