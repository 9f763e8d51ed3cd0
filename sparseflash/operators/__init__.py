"""The operators that torch.compile, autograd and opcheck see."""
