"""Block-sparse attention at the speed that its density promises."""

from sparseflash import select
from sparseflash.attention import attention, explain, plan

__all__ = ["attention", "explain", "plan", "select"]
