#!/usr/bin/env python
"""Make what a fresh stack lacks: the bucket, the work pools, the deployments. Safe to run again.

Then prove that the store can guard a publication (`packhouse doctor storage`): a store that ignores
conditional writes is found now, not when two runs race.
"""

import os
import subprocess
import sys
import time

from packhouse.store.s3 import make_client

STORE = os.environ.get("PACKHOUSE_STORE", "s3://packhouse")
DEPLOY = "deployments/deploy.py"


def main() -> None:
    """Run the three steps; the first that fails ends it with that command's exit code."""
    _make_bucket(STORE.removeprefix("s3://").split("/")[0])
    _run("packhouse", "doctor", "storage", STORE)
    _run("python", DEPLOY)


def _make_bucket(bucket: str, attempts: int = 30) -> None:
    """Create the bucket; a gateway that answers its health check may not have its disks yet."""
    from botocore.exceptions import BotoCoreError, ClientError

    client = make_client()
    for attempt in range(attempts):
        try:
            client.create_bucket(Bucket=bucket)
            return
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                return
            if attempt == attempts - 1 or code in ("AccessDenied", "SignatureDoesNotMatch"):
                raise
        except BotoCoreError:
            if attempt == attempts - 1:
                raise
        time.sleep(1)  # the gateway's disks come within seconds of it


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
