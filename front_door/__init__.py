"""gunicorn's worker: connections and whole requests, before anything of ours sees them."""
