"""Discovery of workers and peers, and health polls of workers."""
