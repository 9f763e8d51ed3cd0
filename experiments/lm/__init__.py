"""Language models: data, models, training, and the comparisons of the FlashAttention papers."""
