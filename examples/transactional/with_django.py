"""Django: the order and its job are committed together, or neither is. The database is the one of the ledger.

In a project, `configure` is the settings file, and `Order` is a model of an application.
"""

from typing import Any
from urllib.parse import parse_qsl, urlsplit

import django
from django.conf import settings
from django.db import connection, models, transaction

from examples.transactional.shop import Shipment, app
from trellis.integrations.sql import submit_on


def configure(url: str) -> None:
    """Set Django up with the database at this URL."""
    parts = urlsplit(url)
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "USER": parts.username or ""}
    database |= {"HOST": parts.hostname or "", "PORT": str(parts.port or ""), "PASSWORD": parts.password or ""}
    database |= {name.upper(): value for name, value in parse_qsl(parts.query)}
    settings.configure(DATABASES={"default": database}, DEFAULT_AUTO_FIELD="django.db.models.BigAutoField")
    django.setup()


def order_model() -> Any:
    """The shop's own table. Django makes models only once it is set up."""

    class Order(models.Model):
        id = models.TextField(primary_key=True)

        class Meta:
            app_label = "shop"
            db_table = "shop_order"

        def __str__(self) -> str:
            return self.id

    return Order


def place_order(model: Any, order: str) -> str:
    """Store the order and submit its job, in one transaction."""
    with transaction.atomic():
        model.objects.create(id=order)
        return submit_on(connection, "order.ship", Shipment(order), app=app).job_id
