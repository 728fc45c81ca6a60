"""Alembic runs this; the connection is the store's own."""

from alembic import context

from proxy.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
