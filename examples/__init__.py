"""Small applications that run."""
