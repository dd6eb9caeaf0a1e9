"""Tools that are HTTP requests, and the machinery that sends them."""
