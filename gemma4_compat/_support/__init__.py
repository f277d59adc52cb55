"""For a user with an error: which patch it concerns, and what to put into a report. Imports nothing upstream."""
