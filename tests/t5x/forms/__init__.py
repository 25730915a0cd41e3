"""Small projects in the forms of real ones that were written for T5X; each says what T5X does."""
