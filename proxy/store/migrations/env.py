"""Alembic's entry: it works on the connection, and in the transaction, that ``upgrade`` was given."""

from alembic import context

from proxy.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
