"""A gunicorn worker that reads whole requests before a thread handles them."""
