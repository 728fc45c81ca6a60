"""The schema's history. ``upgrade`` is the front door; ``env.py`` and ``versions/`` are Alembic's."""

import threading
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

HERE = Path(__file__).parent
ONE_AT_A_TIME = threading.Lock()  # Alembic's context is one per process


def upgrade(connection: sa.Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(HERE).replace("%", "%%"))
    config.attributes["connection"] = connection
    with ONE_AT_A_TIME:
        command.upgrade(config, "head")
