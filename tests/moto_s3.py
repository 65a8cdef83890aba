"""moto's S3 server: in this process for tests that use a bucket but do not test S3, or on a port.

`python -m tests.moto_s3 PORT` answers one request at a time: moto compares the ETag of a
conditional write and then writes without a lock, so that of two writes at once both can be
accepted.
"""

import io
import sys
import threading
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


def serve(port: int) -> None:
    """Serve on a port of loopback until killed, one request at a time."""
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import run_simple

    moto = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()

    def app(environ: Any, start_response: Any) -> Any:
        if size := environ.get("CONTENT_LENGTH"):
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(size)))
        with one_at_a_time:
            return moto(environ, start_response)

    run_simple("127.0.0.1", port, app, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
