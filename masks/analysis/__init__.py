"""What a block mask amounts to: numbers (`stats`), and what is seen through layers (`reach`)."""
