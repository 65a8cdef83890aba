"""An S3 server in this process, for tests that use a bucket but do not test S3."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def s3_client(bucket: str) -> Iterator[Any]:
    """Start moto, point the AWS environment to it, create a bucket, and return a client."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            patch.setenv("AWS_ACCESS_KEY_ID", "test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            client = boto3.client("s3")
            client.create_bucket(Bucket=bucket)
            yield client
            client.close()
    finally:
        server.stop()
