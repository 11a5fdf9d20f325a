"""A text with its tokens kept, dropped and unmapped: measured, in a terminal, as a page."""
