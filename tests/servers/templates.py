"""Databases that tests copy, and the roles they log in as. The schema is made once for the whole suite, not by each test process."""

import asyncio
from pathlib import Path

from tests.servers.postgres import Contents, PostgresServer

TEMPLATE = "trellis_template"
"""A migrated database."""
CLOCKED_TEMPLATE = "trellis_clocked"
"""A migrated database whose clock tests set, with what sets a used copy back (`fresh.sql`)."""
LOGIN = "trellis_app_login"
FAULTS_LOGIN = "faults_login"
"""Roles that are members of the application's role and own nothing."""
FRESH = Path(__file__).parent / "fresh.sql"


def _make_templates(server: PostgresServer) -> None:
    from trellis.ledgers.postgres.migrate import migrate

    asyncio.run(migrate(server.create_database(TEMPLATE)))
    asyncio.run(migrate(server.create_database(CLOCKED_TEMPLATE), clock="test"))
    server.sql(FRESH.read_text(), CLOCKED_TEMPLATE)
    for login in (LOGIN, FAULTS_LOGIN):
        server.sql(f"CREATE ROLE {login} LOGIN IN ROLE trellis_app")
    for template in (TEMPLATE, CLOCKED_TEMPLATE):
        server.seal_template(template)


TEMPLATES = Contents(name="templates", fill=_make_templates)
IN_A_HURRY = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": 500}
"""For a server in which hundreds of databases are made and dropped, and none outlives it: what a crash leaves is tested elsewhere."""
