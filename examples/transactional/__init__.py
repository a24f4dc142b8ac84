"""A job submitted in a transaction of your own: with SQLAlchemy, psycopg, Django and FastAPI."""
