"""Block-sparse attention at the speed that its density promises."""

from sparseflash.attention import attention, explain, plan

__all__ = ["attention", "explain", "plan"]
