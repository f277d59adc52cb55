"""Tables, pages and pictures of the committed results."""
