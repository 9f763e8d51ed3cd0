"""The Long Range Arena encoder, and and the attentions that it can use."""
