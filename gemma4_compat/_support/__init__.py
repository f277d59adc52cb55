"""For a user with an error in hand: which patch it is about, and what a report says. Imports nothing upstream."""
