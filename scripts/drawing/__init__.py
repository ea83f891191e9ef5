"""The pictures of the documentation, a file for each page or group of cards."""
