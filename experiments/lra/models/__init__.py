"""The Long Range Arena encoder, and one file for each attention that it can use."""
