"""Block-sparse attention at the speed that its density promises."""

from sparseflash.attention import attention, explain

__all__ = ["attention", "explain"]
