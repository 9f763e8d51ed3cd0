"""Pathfinder images (Linsley et al., NeurIPS 2018; Kim et al., ICLR 2020) of any size of the Long
Range Arena, made by the original algorithm with every geometric step in tables."""
