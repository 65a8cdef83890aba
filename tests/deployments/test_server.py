"""The server on SQLite: a transaction that reads and then writes survives a concurrent write."""

import os
from pathlib import Path

from tests.prepared import python

ROOT = Path(__file__).resolve().parents[2]
TRANSACTIONS = """
import asyncio
import sqlalchemy as sa
from prefect.server.database.dependencies import provide_database_interface
from deployments.server import begin_as_write

async def write(db):
    async with db.session_context(begin_transaction=True) as session:
        await session.execute(sa.text("insert into rows values (1)"))

async def main(patience):
    db = provide_database_interface()
    async with db.session_context(begin_transaction=True) as session:
        await session.execute(sa.text("drop table if exists rows"))
        await session.execute(sa.text("create table rows (number int)"))
    try:
        async with db.session_context(begin_transaction=True) as session:
            await session.execute(sa.text("select count(*) from rows"))
            other = asyncio.create_task(write(db))
            await asyncio.wait([other], timeout=patience)  # it ends only if it need not wait
            await session.execute(sa.text("insert into rows values (2)"))
    except sa.exc.OperationalError as error:
        print(error.orig)
    await other
    async with db.session_context() as session:
        print(list(await session.scalars(sa.text("select number from rows order by rowid"))))

asyncio.run(main(60))
begin_as_write()
asyncio.run(main(1))
"""


def test_transactions_wait_for_their_turn_and_would_be_refused_without_it(tmp_path):
    settings = {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path}/rows.db",
    }
    done = python("-c", TRANSACTIONS, cwd=ROOT, env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["database is locked", "[1]", "[2, 1]"]
