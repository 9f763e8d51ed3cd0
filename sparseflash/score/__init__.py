"""Score functions: any bias or transformation of the scores, with gradients of its tensors."""

from sparseflash.score.function import Bound, Score, score

__all__ = ["Bound", "Score", "score"]
